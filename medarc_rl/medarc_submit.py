"""`medarc_submit sft|dpo|rm|rl|eval CONFIG --to …`: check a run, hand it to a back-end, record it in the job log.

Every submission goes through `submit`, also those of `medarc_slurm`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from medarc_rl.backends.options import (
    MOST_NODES,
    NODE_GPUS,
    KubernetesOptions,
    PolicyOptions,
    RayOptions,
    RlShape,
    SageMakerOptions,
    SlurmOptions,
)
from medarc_rl.backends.protocol import OPTIONS, Kind, Prepared, Request, backend
from medarc_rl.cli import Group, Lazy, Resume, new_app, resume_words, say, warn
from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.jobs import JobLog, JobRecord, circumstances, config_files, record_job

if TYPE_CHECKING:
    from medarc_rl.utils import ConfigT, GivenConfig


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(SlurmOptions, KubernetesOptions, RayOptions, SageMakerOptions):
    """Options of all commands: the back-ends' own, and those that all of them have."""

    to: Annotated[
        Literal["slurm", "kubernetes", "ray", "sagemaker"],
        Option(help="Back-end. Its options begin with its name below; those of slurm are in `medarc_slurm --help`."),
    ]
    name: Annotated[str | None, Option(help="Name of the job; by default the back-end's own choice.")] = None
    output_dir: Annotated[
        str | None,
        Option(metavar="PATH|URL", help="OUT on the job's machine, or an s3:// prefix."),
    ] = None
    resume: Resume = None
    # Both Slurm and SageMaker have it.
    project_dir: Annotated[Path, Option(help="sagemaker: directory that is sent and that the job runs in.")] = Path()
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
        int | None, Option(min=1, max=MOST_NODES, help="Number of nodes; by default deployment.num_nodes, or 1.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class RlOptions(RlShape, SubmitOptions):
    """Options of `rl`."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions(SubmitOptions):
    gpus: Annotated[int, Option(min=0, max=NODE_GPUS, help="GPUs of the node; 0 is a CPU.")] = 1


def sft(words: list[str], options: SftOptions) -> int:
    """Submit supervised fine-tuning."""
    return submit(sft_request("sft", words, options))


def dpo(words: list[str], options: SftOptions) -> int:
    """Submit training on preferences: DPO and its variants."""
    return submit(sft_request("dpo", words, options))


def rm(words: list[str], options: SftOptions) -> int:
    """Submit training of a reward model on preferences."""
    return submit(sft_request("rm", words, options))


def rl(words: list[str], options: RlOptions) -> int:
    """Submit reinforcement learning: inference server, orchestrator and trainer."""
    return submit(rl_request(words, options))


def evaluate(words: list[str], options: EvalOptions) -> int:
    """Submit an evaluation of a model and its checkpoints."""
    from prime_rl.configs.eval import OfflineEvalConfig

    given = _given(OfflineEvalConfig, words, options)
    return submit(_request("eval", given, options, gpus=options.gpus, nodes=1))


def sagemaker_policy(options: PolicyOptions) -> int:
    """Print the least rights that submissions to SageMaker and their jobs need, as IAM policies in JSON.

    `submitter` is for the user of medarc_submit, `job_role` for the role of --role, and `job_role_trust` lets
    SageMaker take that role. Contacts nobody.
    """
    from medarc_rl.backends.sagemaker.permissions import print_policies

    return print_policies(options)


HIDDEN = tuple(field.name for field in fields(SlurmOptions) if field.name != "project_dir")
"""Options that `medarc_slurm --help` shows."""
COMMANDS: Mapping[str, Lazy | Group] = {
    "sft": Lazy("medarc_rl.medarc_submit:sft", "Submit supervised fine-tuning.", HIDDEN),
    "dpo": Lazy("medarc_rl.medarc_submit:dpo", "Submit training on preferences: DPO and its variants.", HIDDEN),
    "rm": Lazy("medarc_rl.medarc_submit:rm", "Submit training of a reward model on preferences.", HIDDEN),
    "rl": Lazy(
        "medarc_rl.medarc_submit:rl",
        "Submit reinforcement learning: inference server, orchestrator and trainer.",
        HIDDEN,
    ),
    "eval": Lazy("medarc_rl.medarc_submit:evaluate", "Submit an evaluation of a model and its checkpoints.", HIDDEN),
    "sagemaker-policy": Lazy(
        "medarc_rl.medarc_submit:sagemaker_policy",
        "Print the least rights that submissions to SageMaker and their jobs need, as IAM policies in JSON.",
    ),
}
app = new_app(
    "medarc_submit",
    "Submit a run to Kubernetes, Ray or SageMaker, from a TOML file. For Slurm, take medarc_slurm, or its options with "
    "--to slurm.",
    COMMANDS,
)


def sft_request(kind: Kind, words: list[str], options: SftOptions, program: str = "medarc_submit") -> Request:
    """A submission of `sft`, `dpo` or `rm`."""
    from medarc_rl.deployment import sft_nodes_of, sft_owned
    from prime_rl.configs.surface.root import ROOTS

    given: GivenConfig[Any] = _given(ROOTS[kind], words, options)
    # Slurm's launcher accepts `deployment.type = "multi_node"` with one node. Those of the other back-ends do not, so
    # that such a config becomes one for a single node.
    nodes = options.nodes or (None if options.to == "slurm" else sft_nodes_of(given))
    owned = sft_owned(given, options.gpus or None, nodes)
    return _request(kind, given, options, program, owned=owned, gpus=options.gpus, nodes=nodes or 1)


def rl_request(words: list[str], options: RlOptions, program: str = "medarc_submit") -> Request:
    from medarc_rl.deployment import rl_nodes, rl_split
    from prime_rl.configs.rl import RLConfig

    given = _given(RLConfig, words, options)
    if (nodes := rl_nodes(given, options)) is not None:
        return _request("rl", given, options, program, owned=nodes.owned, nodes=nodes.total)
    split = rl_split(given, options)
    return _request("rl", given, options, program, owned=split.owned, nodes=1, split=split)


def _given(root: type[ConfigT], words: list[str], options: SubmitOptions) -> GivenConfig[ConfigT]:
    """Read the config, once the options are known to be the back-end's. Raises UsageError."""
    # Imported here: `--help` reads no config.
    from medarc_rl.utils import GivenConfig

    if faults := list(foreign_options(options)):
        raise UsageError(*faults)
    return GivenConfig.read(root, [*words, *resume_words(options.resume)])


def _request(
    kind: Kind, given: GivenConfig[Any], options: SubmitOptions, program: str = "medarc_submit", **shape: Any
) -> Request:
    return Request(
        kind=kind,
        given=given,
        config=config_files(given.words),
        name=options.name,
        output_dir=options.output_dir,
        resume=options.resume,
        options=options,
        program=program,
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
    """Check, send and record a job, and wait for it if that was asked for. Returns the exit code.

    Raises:
        MedarcError: the back-end refuses it.
    """
    options: SubmitOptions = request.options
    chosen = backend(options.to)
    prepared: Prepared = chosen.prepare(request)
    if options.dry_run or prepared.is_dry_run:
        sys.stdout.write(prepared.text if prepared.text.endswith("\n") else f"{prepared.text}\n")
        return 0
    if prepared.run_here is not None:
        return prepared.run_here()
    submitted = chosen.submit(prepared)
    for line in submitted.lines or [f"submitted to {options.to}: {submitted.id}"]:
        say(line)
    record = JobRecord(
        name=prepared.name,
        backend=options.to,
        id=submitted.id,
        kind=request.kind,
        config=request.config,
        output=prepared.output,
        details={**prepared.details, **submitted.details},
        **circumstances(request.program),
    )
    is_recorded = submitted.id != "" and record_job(record)
    if submitted.fault:
        raise MedarcError(submitted.fault)
    if not options.wait:
        return 0
    if not is_recorded:
        raise MedarcError("--wait needs the job log; the job continues")
    from medarc_rl.medarc_jobs import WaitOptions, wait_for

    if prepared.wait_shows_output and (code := _show_output(record)):
        return code
    return wait_for([record], JobLog.of_user(), WaitOptions(jobs=[record.key]))


def _show_output(record: JobRecord) -> int:
    """Print the job's output until it has ended. If that fails, waiting goes on without it."""
    from medarc_rl.medarc_jobs import INTERRUPTED, LogsOptions, logs

    try:
        return logs(LogsOptions(job=record.key, follow=True))
    except KeyboardInterrupt:
        return INTERRUPTED
    except MedarcError as error:
        warn(f"its output cannot be shown: {error}")
        return 0


def main() -> None:
    app()
