"""`medarc_submit sft|rl|eval CONFIG --to …`: check a run, hand it to a back-end, record it in the job log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from typer import Option

from medarc_rl.backends.backend import Kind, Prepared, Request
from medarc_rl.backends.kubernetes.kubernetes_options import KubernetesOptions
from medarc_rl.backends.ray.ray_options import RayOptions
from medarc_rl.backends.registry import OPTIONS, backend
from medarc_rl.backends.sagemaker.sagemaker_options import PolicyOptions, SageMakerOptions
from medarc_rl.cli import NODE_GPUS, Resume, add_command, add_command_without_config, new_app, resume_words, say, warn
from medarc_rl.deployment import rl_nodes, rl_split, sft_nodes_of, sft_owned
from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.jobs.log import JobLog, config_files
from medarc_rl.jobs.record import JobRecord, circumstances
from medarc_rl.jobs.recording import record_job
from medarc_rl.utils import ConfigT, GivenConfig, OwnedKeys
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(KubernetesOptions, RayOptions, SageMakerOptions):
    """Options of all commands: the back-ends' own, and those that all of them have."""

    to: Annotated[
        Literal["kubernetes", "ray", "sagemaker"], Option(help="Back-end. Its options begin with its name below.")
    ]
    name: Annotated[str | None, Option(help="Name of the job; by default the back-end's own choice.")] = None
    output_dir: Annotated[
        str | None,
        Option(metavar="PATH|URL", help="OUT on the job's machine, or an s3:// prefix."),
    ] = None
    resume: Resume = None
    wait: Annotated[bool, Option("--wait", help="Stay until the job has ended; exit as `medarc_jobs wait` does.")] = (
        False
    )
    dry_run: Annotated[bool, Option("--dry-run", help="Print exactly what would be sent, and send nothing.")] = False


@dataclass(frozen=True, kw_only=True)
class SftOptions(SubmitOptions):
    gpus: Annotated[
        int | None, Option(min=0, max=NODE_GPUS, help="GPUs of a node; 0 is a CPU; by default deployment.num_gpus.")
    ] = None
    nodes: Annotated[
        int | None, Option(min=1, max=1024, help="Number of nodes; by default deployment.num_nodes, or 1.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class RlOptions(SubmitOptions):
    train_gpus: Annotated[
        int | None, Option(min=1, max=NODE_GPUS, help="GPUs of the trainer, 1 to 4 of one node; by default 1.")
    ] = None
    infer_gpus: Annotated[
        int | None, Option(min=1, max=NODE_GPUS, help="GPUs of the inference server; by default 1.")
    ] = None
    single_gpu: Annotated[bool, Option("--single-gpu", help="One GPU for both.")] = False
    train_nodes: Annotated[
        int | None,
        Option(min=1, max=1024, help="Nodes of the trainer alone. --train-gpus then counts per node."),
    ] = None
    infer_nodes: Annotated[
        int | None,
        Option(min=1, max=1024, help="Nodes of inference alone, with one server each. --infer-gpus: per node."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EvalOptions(SubmitOptions):
    gpus: Annotated[int, Option(min=0, max=NODE_GPUS, help="GPUs of the node; 0 is a CPU.")] = 1


app = new_app(
    "medarc_submit", "Submit a run to Kubernetes, Ray or SageMaker, from a TOML file. For Slurm, take medarc_slurm."
)


def sft(words: list[str], options: SftOptions) -> int:
    """Submit supervised fine-tuning."""
    given = _given(SFTConfig, words, options)
    nodes = options.nodes or sft_nodes_of(given)
    owned = sft_owned(given, options.gpus or None, nodes)
    return submit(_request("sft", given, options, owned, nodes=nodes, gpus=options.gpus))


def rl(words: list[str], options: RlOptions) -> int:
    """Submit reinforcement learning: inference server, orchestrator and trainer."""
    given = _given(RLConfig, words, options)
    nodes = rl_nodes(
        given, (options.train_nodes, options.infer_nodes), (options.train_gpus, options.infer_gpus), options.single_gpu
    )
    if nodes is None:
        split = rl_split(given, options.train_gpus, options.infer_gpus, options.single_gpu)
        return submit(_request("rl", given, options, split.owned, nodes=1, split=split))
    return submit(_request("rl", given, options, nodes.owned, nodes=nodes.total))


def evaluate(words: list[str], options: EvalOptions) -> int:
    """Submit an evaluation of a model and its checkpoints."""
    given = _given(OfflineEvalConfig, words, options)
    return submit(_request("eval", given, options, {}, nodes=1, gpus=options.gpus))


def sagemaker_policy(options: PolicyOptions) -> int:
    """Print the least rights that submissions to SageMaker and their jobs need, as IAM policies in JSON.

    `submitter` is for the user of medarc_submit, `job_role` for the role of --role, and `job_role_trust` lets
    SageMaker take that role. Contacts nobody.
    """
    from medarc_rl.backends.sagemaker.permissions import print_policies

    return print_policies(options)


add_command(app, "sft", SftOptions, sft)
add_command(app, "rl", RlOptions, rl)
add_command(app, "eval", EvalOptions, evaluate)
add_command_without_config(app, "sagemaker-policy", PolicyOptions, sagemaker_policy)


def _given(root: type[ConfigT], words: list[str], options: SubmitOptions) -> GivenConfig[ConfigT]:
    """Read the config, after the options were checked. Raises UsageError."""
    if faults := list(foreign_options(options)):
        raise UsageError(*faults)
    return GivenConfig.read(root, [*words, *resume_words(options.resume)])


def _request(kind: Kind, given: GivenConfig[Any], options: SubmitOptions, owned: OwnedKeys, **shape: Any) -> Request:
    return Request(
        kind=kind,
        given=given,
        config=config_files(given.words),
        name=options.name,
        output_dir=options.output_dir,
        resume=options.resume,
        owned=owned,
        options=options,
        **shape,
    )


def foreign_options(options: SubmitOptions) -> Iterator[str]:
    """One line for each option that was given and that the chosen back-end does not have."""
    for field in fields(options):
        owners = [name for name, cls in OPTIONS.items() if field.name in {each.name for each in fields(cls)}]
        if not owners or options.to in owners:
            continue
        default = field.default_factory() if callable(field.default_factory) else field.default
        if getattr(options, field.name) != default:
            yield f"--{field.name.replace('_', '-')} is an option of --to {' and '.join(owners)}, not of {options.to}"


def submit(request: Request) -> int:
    """Check, send and record a job. Returns the exit code.

    Raises:
        MedarcError: the back-end refuses it.
    """
    options: SubmitOptions = request.options
    chosen = backend(options.to)
    prepared: Prepared = chosen.prepare(request)
    if options.dry_run:
        sys.stdout.write(prepared.text if prepared.text.endswith("\n") else f"{prepared.text}\n")
        return 0
    if prepared.run_here is not None:
        return prepared.run_here()
    submitted = chosen.submit(prepared)
    record = JobRecord(
        name=prepared.name,
        backend=options.to,
        id=submitted.id,
        kind=request.kind,
        config=request.config,
        output=prepared.output,
        details={**prepared.details, **submitted.details},
        **circumstances("medarc_submit"),
    )
    say(f"submitted to {options.to}: {submitted.id}")
    is_recorded = record_job(record)
    if not options.wait:
        return 0
    if not is_recorded:
        raise MedarcError("--wait needs the job log; the job goes on")
    from medarc_rl.jobs.command import WaitOptions, wait_for

    if prepared.wait_shows_output and (code := _show_output(record)):
        return code
    return wait_for([record], JobLog.of_user(), WaitOptions(jobs=[record.key]))


def _show_output(record: JobRecord) -> int:
    """Print the job's output until it has ended. If that fails, waiting goes on without it."""
    from medarc_rl.jobs.command import INTERRUPTED, LogsOptions, logs

    try:
        return logs(LogsOptions(job=record.key, follow=True))
    except KeyboardInterrupt:
        return INTERRUPTED
    except MedarcError as error:
        warn(f"its output cannot be shown: {error}")
        return 0


def main() -> None:
    app()
