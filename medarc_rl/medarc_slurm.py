"""`medarc_slurm sft|rl` is `medarc_submit --to slurm` with its own help page. `medarc_slurm check` submits nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from typer import Option

from medarc_rl import medarc_submit
from medarc_rl.backends.options import MOST_NODES, NODE_GPUS, RlShape, SlurmJobOptions, SlurmOptions
from medarc_rl.backends.protocol import Kind
from medarc_rl.cli import Group, Lazy, Resume, new_app
from medarc_rl.commands.estimating import EstimateOptions
from medarc_rl.errors import UsageError

PROGRAM = "medarc_slurm"
KINDS: tuple[Kind, ...] = ("sft", "dpo", "rm", "rl")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    output_dir: Annotated[Path | None, Option(help="Directory of the run, OUT.")] = None
    resume: Resume = None


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(EstimateOptions, SlurmOptions, RunOptions):
    dry_run: Annotated[bool, Option("--dry-run", help="Write the config and the script; do not submit.")] = False


@dataclass(frozen=True, kw_only=True)
class SftGpus:
    gpus: Annotated[
        int | None, Option(min=1, max=NODE_GPUS, help="GPUs of each node; by default those of deployment.")
    ] = None
    nodes: Annotated[
        int | None, Option(min=1, max=MOST_NODES, help="Nodes; by default deployment.num_nodes, or 1.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SftOptions(SftGpus, SubmitOptions):
    """Options of `sft`."""


@dataclass(frozen=True, kw_only=True)
class RlOptions(RlShape, SubmitOptions):
    """Options of `rl`."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions(RlShape, SftGpus, SlurmJobOptions, RunOptions):
    """Options of `check`: those of the command whose job is checked."""

    json: Annotated[bool, Option("--json", help="Print JSON.")] = False


def sft(words: list[str], options: SftOptions) -> int:
    """Submit supervised fine-tuning."""
    return _submit_sft("sft", words, options)


def dpo(words: list[str], options: SftOptions) -> int:
    """Submit training on preferences: DPO and its variants."""
    return _submit_sft("dpo", words, options)


def rm(words: list[str], options: SftOptions) -> int:
    """Submit training of a reward model on preferences."""
    return _submit_sft("rm", words, options)


def _submit_sft(kind: Kind, words: list[str], options: SftOptions) -> int:
    request = medarc_submit.sft_request(kind, words, _as_submission(medarc_submit.SftOptions, options), PROGRAM)
    if not options.estimate:
        return medarc_submit.submit(request)
    from medarc_rl.backends.slurm.job import plan
    from medarc_rl.commands.estimating import print_sft_estimate
    from medarc_rl.deployment import training_gpus
    from medarc_rl.utils import refuse_unstartable

    job, run = plan(request)
    refuse_unstartable(run.config, job.project_dir, is_estimate=True)
    return print_sft_estimate(run.config, training_gpus(run.config), options, in_job=True)


def rl(words: list[str], options: RlOptions) -> int:
    """Submit reinforcement learning."""
    request = medarc_submit.rl_request(words, _as_submission(medarc_submit.RlOptions, options), PROGRAM)
    if not options.estimate:
        return medarc_submit.submit(request)
    from medarc_rl.backends.slurm.job import plan
    from medarc_rl.commands.estimating import print_rl_estimate
    from medarc_rl.utils import refuse_unstartable

    job, run = plan(request)
    refuse_unstartable(run.config, job.project_dir, is_estimate=True)
    return print_rl_estimate(run.config, job.shares_gpus, options, in_job=True)


def check(words: list[str], options: CheckOptions) -> int:
    """Check all that a job needs, and submit nothing.

    CONFIG and the options are those of `sft`, `dpo`, `rm` or `rl`; where the file fits several, write `check sft`. Exit
    code: 0 if everything is there, 1 if something is not, 2 if the config cannot be used.
    """
    from medarc_rl.backends.slurm.backend import passes_checks
    from medarc_rl.backends.slurm.job import plan
    from medarc_rl.utils import check_startable, maybe_autoset_auth_env

    kind, words = _job_kind(words)
    own, other = (RlShape, SftGpus) if kind == "rl" else (SftGpus, RlShape)
    given = [each.name for each in fields(other) if getattr(options, each.name) != each.default]
    if given:
        raise UsageError(f"{_listed(given)}: no option of {kind}, which takes {_listed(f.name for f in fields(own))}")
    if kind == "rl":
        request = medarc_submit.rl_request(words, _as_submission(medarc_submit.RlOptions, options), PROGRAM)
    else:
        request = medarc_submit.sft_request(kind, words, _as_submission(medarc_submit.SftOptions, options), PROGRAM)
    job, run = plan(request)
    check_startable(run, dry_run=False, job_dir=job.project_dir, waits=job.queued is not None)
    env = dict(os.environ)
    maybe_autoset_auth_env(env, options.auto_auth)
    return 0 if passes_checks(job, run, env, options.json) else 1


COMMANDS: Mapping[str, Lazy | Group] = {
    "sft": Lazy("medarc_rl.medarc_slurm:sft", "Submit supervised fine-tuning."),
    "dpo": Lazy("medarc_rl.medarc_slurm:dpo", "Submit training on preferences: DPO and its variants."),
    "rm": Lazy("medarc_rl.medarc_slurm:rm", "Submit training of a reward model on preferences."),
    "rl": Lazy("medarc_rl.medarc_slurm:rl", "Submit reinforcement learning."),
    "check": Lazy("medarc_rl.medarc_slurm:check", "Check all that a job needs, and submit nothing."),
    "status": Lazy("medarc_rl.medarc_jobs:status", "Show what became of jobs."),
    "logs": Lazy("medarc_rl.medarc_jobs:logs", "Print a job's output."),
    "cancel": Lazy("medarc_rl.medarc_jobs:cancel", "End jobs."),
}
app = new_app("medarc_slurm", "Submit a run to Slurm, from a TOML file.", COMMANDS)

SubmissionT = TypeVar("SubmissionT", bound=medarc_submit.SubmitOptions)


def _as_submission(cls: type[SubmissionT], options: Any) -> SubmissionT:
    """The options of `medarc_submit --to slurm` that these options of `medarc_slurm` stand for."""
    common = {field.name for field in fields(cls)} & {field.name for field in fields(options)}
    given = {name: getattr(options, name) for name in common - {"output_dir"}}
    return cls(to="slurm", output_dir=None if options.output_dir is None else str(options.output_dir), **given)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _job_kind(words: list[str]) -> tuple[Kind, list[str]]:
    """The kind of job that a command line is about, and its words without the kind.

    The first word may name it; otherwise the keys of the files do.

    Raises:
        UsageError: no file is named, or it is for another command, or it fits several kinds.
    """
    if (named := next((kind for kind in KINDS if [kind] == words[:1]), None)) is not None:
        return named, words[1:]
    files = [Path(word.removeprefix("@")) for word in words if word.endswith(".toml") and not word.startswith("-")]
    if not files:
        raise UsageError("no config: name a TOML file, as in `check config.toml` or `check rl @ config.toml`")
    from medarc_rl.migrate.draft import names
    from prime_rl.configs.surface.root import unknown_counts
    from prime_rl.utils.pydantic_config import ConfigError
    from prime_rl.utils.pydantic_config.toml_files import read_files
    from prime_rl.utils.tables import leaves

    try:
        layers = read_files(files).layers
    except ConfigError as error:
        raise UsageError(*error.faults) from error
    keys = {".".join(names(path)) for layer in layers for path, _ in leaves(layer.data)}
    unknown = unknown_counts(keys)
    fewest = min(unknown.values())
    fitting = [kind for kind in KINDS if unknown[kind] == fewest]
    if not fitting:
        others = " or ".join(kind for kind, count in unknown.items() if count == fewest)
        raise UsageError(f"{files[-1]}: a config of {others}; jobs are submitted for {' and '.join(KINDS)}")
    if len(fitting) > 1:
        choices = " or ".join(f"`check {kind}`" for kind in fitting)
        raise UsageError(f"{files[-1]}: could be a config of {' or '.join(fitting)}: write {choices} before it")
    return fitting[0], words


def main() -> None:
    app()
