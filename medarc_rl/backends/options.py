"""Options of `medarc_submit`, `medarc_slurm` and each back-end, and the `NAME=VALUE` pairs among them.

Imports little more than Typer, because every help page needs this module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args

from typer import Option

from medarc_rl.jobs import redacted
from prime_rl.utils.private import is_secret_name

NODE_GPUS = 8
"""GPUs of a node of our clusters."""
STOP_LEAD_S = 120
"""Seconds before its time limit at which a Slurm job is asked to save and stop, without `--signal-before`."""
SHORTEST_TIME_WITH_LEAD_S = 10 * STOP_LEAD_S
"""A job with a shorter time limit gets no such warning, unless it asks for one: it would lose a tenth of its time."""
MAX_REQUEUES = 20
MOST_NODES = 1024
Runtime = Literal["apptainer", "pyxis"]
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)


@dataclass(frozen=True, kw_only=True)
class SlurmRequest:
    """Options for Slurm, apart from GPUs, on the command line and in the script's header.

    None prints nothing and leaves the choice to the cluster.
    """

    # Not read by Typer, as SageMaker's variables below: the option would look given to the other back-ends.
    account: Annotated[str | None, Option(help="Account to charge; by default $SBATCH_ACCOUNT or $SLURM_ACCOUNT.")] = (
        None
    )
    time: Annotated[str | None, Option(help="Time limit, as in 90 (minutes), 2:30:00 or 1-12 (days-hours).")] = None
    partition: Annotated[str | None, Option(help="Partition.")] = None
    qos: Annotated[str | None, Option(help="Quality of service.")] = None
    mem: Annotated[str | None, Option(help="Memory of the node, as in 200G.")] = None
    constraint: Annotated[str | None, Option(help="Features that the node must have.")] = None
    nodelist: Annotated[str | None, Option(help="Run on one of these nodes.")] = None
    exclude: Annotated[str | None, Option(help="Do not run on these nodes.")] = None
    dependency: Annotated[
        str | None, Option(help="Start after other jobs, as in afterany:123. --resume auto continues what they saved.")
    ] = None
    requeue: Annotated[
        bool,
        Option(
            "--requeue", help="Save before the time limit, requeue the job and continue, until the run is complete."
        ),
    ] = False
    max_requeues: Annotated[
        int, Option(min=1, max=1000, help="Maximum number of restarts of the job, for any reason.")
    ] = MAX_REQUEUES
    signal_before: Annotated[
        int | None,
        Option(
            min=30,
            max=65535,
            help="Seconds before the time limit at which the run saves and stops: longer than a step and a save. "
            f"By default {STOP_LEAD_S}, without --requeue from {SHORTEST_TIME_WITH_LEAD_S // 60} minutes on.",
        ),
    ] = None
    # Last in the header, so that it wins over all others.
    sbatch_arg: Annotated[
        list[str], Option(help="Any other option of sbatch, as in --sbatch-arg=--requeue; may be repeated.")
    ] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SlurmJobOptions(SlurmRequest):
    """Options of a batch job, which `medarc_slurm check` has, too."""

    job_name: Annotated[str | None, Option(help="Name of the job; by default <config stem>-sft or -rl.")] = None
    project_dir: Annotated[Path, Option(help="Directory that the job runs in, with .venv, maybe .env.")] = Path()
    setup: Annotated[
        Path | None,
        Option(help="File of bash commands that the job reads first, as `module load cuda` or `conda activate x`."),
    ] = None
    container: Annotated[
        str | None, Option(help="Image to run in instead of the project's .venv. It must have this package installed.")
    ] = None
    container_runtime: Annotated[str, Option(help=f"{' or '.join(RUNTIMES)}.")] = RUNTIMES[0]
    container_mount: Annotated[
        list[str], Option(help="One more directory in the container, SOURCE or SOURCE:TARGET; may be repeated.")
    ] = field(default_factory=list)
    hf_cache_dir: Annotated[
        Path | None, Option(help="Hugging Face cache; by default $HF_HOME, else <project dir>/.hf_cache.")
    ] = None
    hf_hub_offline: Annotated[bool, Option(help="Let the job use only the cache and download nothing.")] = False
    auto_auth: Annotated[
        bool, Option(help="Give the job HF_TOKEN, from the environment or the local Hugging Face login.")
    ] = False
    cpus_per_gpu: Annotated[int, Option(min=1, max=32, help=f"CPUs per GPU; all of them with {NODE_GPUS}.")] = 8


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(SlurmJobOptions):
    """Options of `--to slurm`."""

    check: Annotated[
        bool, Option("--check/--no-check", help="Do not submit a job that `medarc_slurm check` finds fault with.")
    ] = True


@dataclass(frozen=True, kw_only=True)
class RlGpus:
    """GPUs of an RL run's trainer and inference on a node."""

    train_gpus: Annotated[
        int | None,
        Option(min=1, max=NODE_GPUS, help="GPUs of the trainer, on a CPU processes: 1 to 4 of one node; by default 1."),
    ] = None
    infer_gpus: Annotated[
        int | None, Option(min=1, max=NODE_GPUS, help="GPUs of the inference server; by default 1.")
    ] = None
    single_gpu: Annotated[bool, Option("--single-gpu", help="One GPU for both: --colocate 1.")] = False
    colocate: Annotated[
        int | None,
        Option(min=1, max=NODE_GPUS, help="So many GPUs of one node, each for a process of the trainer and a server."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RlShape(RlGpus):
    """The same, and nodes."""

    train_nodes: Annotated[
        int | None,
        Option(min=1, max=MOST_NODES, help="Nodes of the trainer alone. --train-gpus then counts per node."),
    ] = None
    infer_nodes: Annotated[
        int | None,
        Option(min=1, max=MOST_NODES, help="Nodes of inference alone, with one server each. --infer-gpus: per node."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ContainerOptions:
    """Options of back-ends that start a container for each job."""

    image: Annotated[
        str | None,
        Option(help="kubernetes, sagemaker: image with this package installed; with a tag or a digest."),
    ] = None

    env: Annotated[
        list[str],
        Option(
            metavar="NAME=VALUE",
            help="kubernetes, sagemaker: environment variable of the job, not for secrets; may be repeated.",
        ),
    ] = field(default_factory=list)
    secret_env: Annotated[
        list[str],
        Option(
            metavar="NAME=REFERENCE",
            help="kubernetes: variable from a key of a Secret, as NAME=SECRET/KEY; sagemaker: from Secrets Manager or "
            "Parameter Store, as NAME=ARN. May be repeated.",
        ),
    ] = field(default_factory=list)
    deadline: Annotated[
        int | None,
        Option(
            min=60,
            max=31_536_000,
            metavar="SECONDS",
            help="kubernetes, sagemaker: end the job after this time; on SageMaker by default after a day.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions(ContainerOptions):
    """Options of `--to kubernetes`."""

    namespace: Annotated[str, Option(help="kubernetes: namespace.")] = "default"
    context: Annotated[str | None, Option(help="kubernetes: context of kubectl; by default the current one.")] = None
    engine: Annotated[
        Literal["auto", "jobset", "ray"],
        Option(help="kubernetes: a JobSet, or a RayJob of KubeRay; auto takes ray for several nodes."),
    ] = "auto"
    output_claim: Annotated[
        str | None, Option(help="kubernetes: claim of a volume, mounted at /output; OUT is a directory in it.")
    ] = None
    secret: Annotated[
        list[str], Option(metavar="SECRET", help="kubernetes: Secret whose keys all become variables; may be repeated.")
    ] = field(default_factory=list)
    cpus: Annotated[float | None, Option(min=0.1, max=4096, help="kubernetes: CPUs of a pod; by default 8 a GPU.")] = (
        None
    )
    memory: Annotated[str | None, Option(help="kubernetes: memory of a pod, as in 64Gi; by default 32Gi a GPU.")] = None
    shm: Annotated[str, Option(help="kubernetes: size of /dev/shm, in the pod's memory.")] = "8Gi"
    gpu_resource: Annotated[str, Option(help="kubernetes: name of the GPU resource.")] = "nvidia.com/gpu"
    node_selector: Annotated[
        list[str], Option(metavar="LABEL=VALUE", help="kubernetes: label that a node must have; may be repeated.")
    ] = field(default_factory=list)
    toleration: Annotated[
        list[str],
        Option(metavar="KEY[=VALUE][:EFFECT]", help="kubernetes: taint that the job tolerates; may be repeated."),
    ] = field(default_factory=list)
    service_account: Annotated[str | None, Option(help="kubernetes: service account of the pods.")] = None
    pull_secret: Annotated[list[str], Option(help="kubernetes: Secret to pull the image with; may be repeated.")] = (
        field(default_factory=list)
    )
    user_id: Annotated[int, Option(min=1, max=2_147_483_647, help="kubernetes: user and group id in the pod.")] = 1000
    retries: Annotated[
        int, Option(min=0, max=100, help="kubernetes: maximum number of restarts after a pod failed or was evicted.")
    ] = 3
    keep: Annotated[
        int, Option(min=0, max=31_536_000, metavar="SECONDS", help="kubernetes: delete the ended job after this time.")
    ] = 604_800
    queue: Annotated[str | None, Option(help="kubernetes: queue of Kueue that admits the job.")] = None


Strategy = Literal["pack", "spread"]


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Options of `--to ray`."""

    ray_address: Annotated[
        str | None,
        Option(metavar="HOST:PORT", help="ray: address of a running cluster; without it, one on this machine."),
    ] = None
    ray_strategy: Annotated[
        Strategy,
        Option(help="ray: place the run's nodes on as few machines of the cluster as possible, or spread them."),
    ] = "pack"


LIMIT_S = 86400
"""Longest time of a job unless `--deadline` says otherwise, in seconds."""
REPOSITORY = "medarc-rl"
# Not read by Typer: with a variable set, the options would look given to other back-ends, which refuse them.
ROLE_VARIABLE = "MEDARC_SAGEMAKER_ROLE"
S3_VARIABLE = "MEDARC_SAGEMAKER_S3"


@dataclass(frozen=True, kw_only=True)
class AccountOptions:
    """Account, region and network of SageMaker's jobs."""

    role: Annotated[
        str | None,
        Option(metavar="ARN", help=f"sagemaker: role that the job runs as; by default ${ROLE_VARIABLE}."),
    ] = None
    s3: Annotated[
        str | None,
        Option(
            metavar="s3://BUCKET/PREFIX",
            help="sagemaker: where sources, runs and outputs are kept, below it a prefix for each job; by default "
            f"${S3_VARIABLE}.",
        ),
    ] = None
    region: Annotated[str | None, Option(help="sagemaker: region; by default that of your AWS configuration.")] = None
    repository: Annotated[str, Option(help="sagemaker: ECR repository of --build.")] = REPOSITORY
    kms_key: Annotated[str | None, Option(help="sagemaker: key that encrypts outputs and the instance's volume.")] = (
        None
    )
    input: Annotated[
        list[str],
        Option(
            metavar="NAME=s3://…",
            help="sagemaker: S3 prefix that the job finds in /opt/ml/input/data/NAME; may be repeated.",
        ),
    ] = field(default_factory=list)
    subnet: Annotated[list[str], Option(help="sagemaker: subnet of the job; may be repeated.")] = field(
        default_factory=list
    )
    security_group: Annotated[list[str], Option(help="sagemaker: security group of the job; may be repeated.")] = field(
        default_factory=list
    )
    file_system: Annotated[
        str | None,
        Option(
            metavar="fsx:ID:/PATH|efs:ID:/PATH",
            help="sagemaker: directory that the instances of a run on several nodes share; needs --subnet.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SageMakerOptions(AccountOptions, ContainerOptions):
    """Options of `--to sagemaker`."""

    profile: Annotated[str | None, Option(help="sagemaker: profile of your AWS configuration.")] = None
    instance_type: Annotated[str | None, Option(help="sagemaker: type of the instance, as ml.g5.2xlarge.")] = None
    volume_gb: Annotated[int, Option(help="sagemaker: disk of the instance, in GB.")] = 100
    spot: Annotated[
        bool,
        Option(
            "--spot",
            help="sagemaker: use spot capacity; if AWS reclaims it, the run saves a checkpoint and continues later.",
        ),
    ] = False
    max_wait: Annotated[
        int | None,
        Option(
            metavar="SECONDS",
            help="sagemaker: with --spot, maximum total time, waiting included; by default twice --deadline.",
        ),
    ] = None
    tag: Annotated[list[str], Option(metavar="NAME=VALUE", help="sagemaker: tag of the job; may be repeated.")] = field(
        default_factory=list
    )
    project_dir: Annotated[Path, Option(help="sagemaker: directory that is sent and that the job runs in.")] = Path()
    include: Annotated[
        list[str],
        Option(
            metavar="PATH",
            help="sagemaker: send this file or directory even if an ignore file lists it; may be repeated.",
        ),
    ] = field(default_factory=list)
    max_upload_mb: Annotated[
        int, Option(min=1, max=100_000, help="sagemaker: maximum size of the project's files.")
    ] = 256
    build: Annotated[
        bool,
        Option("--build", help="sagemaker: build the image with docker and push it to ECR, unless ECR already has it."),
    ] = False
    build_extra: Annotated[
        list[str], Option(help="sagemaker: extra of this package in the image of --build, as vllm; may be repeated.")
    ] = field(default_factory=list)
    local: Annotated[
        bool, Option("--local", help="sagemaker: run the job's container here with docker, without AWS.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(AccountOptions):
    """Options of the command that prints the policies."""

    secret_env: Annotated[
        list[str], Option(metavar="NAME=ARN", help="Secret or parameter that jobs read; may be repeated.")
    ] = field(default_factory=list)
    config: Annotated[
        list[Path],
        Option(metavar="FILE", help="Config of such jobs: the places on S3 that it names count, too; may be repeated."),
    ] = field(default_factory=list)


AccountOptionsT = TypeVar("AccountOptionsT", bound=AccountOptions)


def with_variables(options: AccountOptionsT, env: Mapping[str, str]) -> AccountOptionsT:
    """The options, with what was not given from the environment."""
    return replace(
        options, role=options.role or env.get(ROLE_VARIABLE) or None, s3=options.s3 or env.get(S3_VARIABLE) or None
    )


VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
"""Name of an environment variable."""
NAME = re.compile(r"[^=]+")

ValueT = TypeVar("ValueT")


def pairs(
    option: str,
    words: Sequence[str],
    faults: list[str],
    advice: str,
    read: Callable[[str], ValueT | None],
    name_pattern: re.Pattern[str] = NAME,
) -> dict[str, ValueT]:
    """The values of an option by name. Each word that is not a pair is a fault, which does not repeat the value.

    Args:
        advice: the right form, for faults.
        read: parses a value; None makes it a fault, too.
    """
    found: dict[str, ValueT] = {}
    for word in words:
        name, equals, text = word.partition("=")
        fits = equals and name_pattern.fullmatch(name)
        value = read(text) if fits else None
        if value is None:
            shown = f" {redacted(name)!r}" if equals and name else ""
            faults.append(f"{option}{shown}: {advice}")
        elif name in found:
            faults.append(f"{option} {name}: given twice")
        else:
            found[name] = value
    return found


def plain_variables(words: Sequence[str], faults: list[str], instead: str) -> dict[str, str]:
    """`--env NAME=VALUE`. A literal secret is a fault, and left out.

    Args:
        instead: the right way to give a secret, with `{name}` for its variable.
    """
    advice = "write NAME=VALUE, as in --env OMP_NUM_THREADS=8; a name has letters, digits and underscores"
    found = pairs("--env", words, faults, advice, str, VARIABLE)
    secrets = [name for name, value in found.items() if is_secret_name(name) or redacted(value) != value]
    faults += [
        f"--env {name}: a secret, which everyone who sees the job could read: {instead.format(name=name)}"
        for name in secrets
    ]
    return {name: value for name, value in found.items() if name not in secrets}
