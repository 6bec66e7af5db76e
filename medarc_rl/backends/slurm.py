"""Decides the values of a Slurm batch script, which the templates print.

A script mixes three syntaxes. The body is bash (`sh_quote`). sbatch reads the header, and understands `"` and `\\` but
no other shell syntax (`header_word`). The name of the log is a `%` pattern (`log_pattern`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from typer import Option

from medarc_rl.backends.containers import Container
from medarc_rl.backends.launcher import CONFIGS
from medarc_rl.cli import NODE_GPUS
from medarc_rl.errors import HeaderError, UsageError
from prime_rl.launch.job import Job
from prime_rl.run.paths import RunPaths
from prime_rl.utils.errors import one_line

STOP_LEAD_S = 120
"""Seconds before its time limit at which a job is asked to save and stop, unless `--signal-before` says otherwise."""
MAX_REQUEUES = 20
_SHORTEST_TIME_WITH_LEAD_S = 10 * STOP_LEAD_S

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PLAIN_HEADER = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]-]+")
_CONDITION = r"(?:after(?:ok|notok|any|corr)?(?::\d+(?:_(?:\d+|\*))?(?:\+\d+)?)+|singleton)"
_DEPENDENCY = re.compile(rf"{_CONDITION}(?:(?:,{_CONDITION})*|(?:\?{_CONDITION})*)", re.ASCII)
"""After commas, all conditions must hold; after question marks, one. `after:1+5` is five minutes after job 1 began."""
_ARRAY = re.compile(r"--ar|-[HhIkOQsvWX]*a")
"""sbatch's `--array`, abbreviated, or as `-a` after other letters."""
_NO_REQUEUE = re.compile(r"--no-r")
"""sbatch's `--no-requeue`, abbreviated."""
_LOG = re.compile(r"--(?:ou|er)|-[HhIkOQsvWX]*[oe]")
"""sbatch's `--output` and `--error`, in the same ways."""
_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "--gres": ("GRES", "GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK"),
    "--mem": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"),
    "--requeue": ("REQUEUE", "NO_REQUEUE"),
    "--time": ("TIMELIMIT",),
}
"""Variables of sbatch, without `SBATCH_`, that are named otherwise than their option, or contradict it."""
_OF_A_JOB = {"SLURM_RESTART_COUNT", "MEDARC_MAX_REQUEUES"}
NO_ARRAYS = "the tasks of a job array would share one directory: submit a job for each, with its own --output-dir"
OWN_LOG = "a job's log is in OUT/slurm, where `medarc_jobs logs` looks for it: leave this out, or link to that folder"
_WALLTIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")


@dataclass(frozen=True, kw_only=True)
class SlurmRequest:
    """Options for Slurm, apart from GPUs, on the command line and in the script's header.

    None prints nothing and leaves the choice to the cluster.
    """

    account: Annotated[str | None, Option(envvar=["SBATCH_ACCOUNT", "SLURM_ACCOUNT"], help="Account to charge.")] = None
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
        int, Option(min=1, max=1000, help="How often the job starts again, for whatever reason, before it ends itself.")
    ] = MAX_REQUEUES
    signal_before: Annotated[
        int | None,
        Option(
            min=30,
            max=65535,
            help="Seconds before the time limit at which the run saves and stops: longer than a step and a save. "
            f"By default {STOP_LEAD_S}, without --requeue from {_SHORTEST_TIME_WITH_LEAD_S // 60} minutes on.",
        ),
    ] = None
    # Last in the header, so that it wins over all others.
    sbatch_arg: Annotated[
        list[str], Option(help="Any other option of sbatch, as in --sbatch-arg=--requeue; may be repeated.")
    ] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raises UsageError for an option that would have no effect."""
        if self.max_requeues != MAX_REQUEUES and not self.requeue:
            raise UsageError(f"--max-requeues {self.max_requeues} has an effect only with --requeue: add it")


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job, and how Slurm runs it."""

    job: Job
    name: str
    cpus_per_gpu: int
    project_dir: Path
    hf_cache_dir: Path
    hf_hub_offline: bool = False
    single_gpu: bool = False
    """Inference and trainer share one GPU (`rl` only)."""
    checkpoints: bool = False
    """Whether the run writes checkpoints, from which a requeued job can resume."""
    setup: Path | None = None
    """File of bash commands that prepares the job's shell, such as `module load cuda`."""
    container: Container | None = None
    """The image that the launcher runs in. None uses the project's `.venv`."""
    queued: RunPaths | None = None
    """Where script and config of a job are that waits for another one of the same run. None: in the run's directory."""
    template: Path | None = None
    """The user's own template of the script. None takes ours."""
    infer_nodes: int = 0
    """Nodes of inference alone. The others train."""
    request: SlurmRequest = field(default_factory=SlurmRequest)

    def __post_init__(self) -> None:
        """Raises UsageError for a job that could not continue after a requeue, or not start."""
        if self.request.requeue and not self.checkpoints:
            raise UsageError("--requeue needs checkpoints to continue from: add a [ckpt] table, or --ckpt.interval N")
        if self.request.requeue and self.container is not None:
            raise UsageError(
                "--requeue: the launcher has no scontrol in a container; leave the container out, or let Slurm alone "
                "requeue the job with --sbatch-arg=--requeue"
            )
        if self.nodes > 1 and self.container is not None:
            raise UsageError(
                "--container: agents on several nodes are started with srun, which no container has: leave it out and "
                "keep the environment in a directory that the nodes share, or run on one node"
            )

    @property
    def command(self) -> str:
        """`sft` or `rl`: names the script."""
        return self.job.command

    @property
    def paths(self) -> RunPaths:
        return self.job.paths

    @property
    def nodes(self) -> int:
        return self.job.resources.nodes

    @property
    def gpus(self) -> int:
        """Of each node."""
        return self.job.resources.gpus_per_node

    @property
    def script(self) -> Path:
        return (self.queued or self.paths).batch_script(self.command)

    @property
    def argv(self) -> tuple[str, ...]:
        """The command that the script becomes."""
        argv = self.job.processes[0].argv
        if self.container is None:
            return argv
        return self.container.wrap(argv, self.project_dir, (self.project_dir, self.paths.root, self.hf_cache_dir))


def sh_quote(value: object) -> str:
    """Quote `value` as one bash word on one line. Control characters are escaped: sbatch refuses carriage returns."""
    text = str(value)
    if not _CONTROL.search(text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", escaped) + "'"


def header_word(option: str, value: str) -> str:
    """`option=value` as sbatch reads it from a script's header.

    Raises:
        HeaderError: the header cannot contain the value, for example because of a line break.
    """
    return f"{option}={_header_quote(option, value)}"


def _header_quote(option: str, value: str) -> str:
    if _CONTROL.search(value) or not _is_utf8(value):
        raise HeaderError(option, value)
    if _PLAIN_HEADER.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def log_pattern(paths: RunPaths) -> str:
    """Where Slurm writes a job's output, in the pattern language of `sbatch --output`.

    A backslash anywhere in the pattern disables `%` signs; then all jobs append to one file.
    """
    if "\\" in str(paths.slurm):
        return str(log_file(paths, "")).replace("\\", "\\\\")
    return str(paths.slurm).replace("%", "%%") + "/job_%j.log"


def log_file(paths: RunPaths, job_id: str) -> Path:
    """The file that `log_pattern` means for one job."""
    return paths.slurm / ("job.log" if "\\" in str(paths.slurm) else f"job_{job_id}.log")


def check_dependency(text: str) -> None:
    """Refuse a dependency that Slurm does not read. It would say so only at the submission, in its own words.

    Raises:
        UsageError: `text` has another form than `sbatch --dependency`.
    """
    if _DEPENDENCY.fullmatch(text) is None:
        raise UsageError(
            f"--dependency '{one_line(text)}': write a condition and numbers of jobs, as afterany:123 or "
            "afterok:123:124,singleton; conditions: after, afterok, afternotok, afterany, aftercorr, singleton"
        )


def walltime_s(text: str) -> int:
    """Seconds of a time limit as Slurm writes it: `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S`. 0 is no limit.

    Raises:
        UsageError: `text` has another form.
    """
    if text.upper() in ("INFINITE", "UNLIMITED"):
        return 0
    match = _WALLTIME.fullmatch(text)
    if match is None:
        raise UsageError(f"--time {text!r}: write minutes, hours:minutes:seconds or days-hours, as 90, 2:30:00 or 1-12")
    clock = [int(part) for part in match["clock"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = [*clock, 0, 0][:3]
        return int(match["days"]) * 86400 + hours * 3600 + minutes * 60 + seconds
    hours, minutes, seconds = {1: [0, *clock, 0], 2: [0, *clock], 3: clock}[len(clock)]
    return hours * 3600 + minutes * 60 + seconds


def header(job: BatchJob) -> list[str]:
    """The `#SBATCH` options of a job, in order.

    Raises:
        UsageError: Slurm would refuse an option, or the header cannot contain it.
    """
    return [*_placement(job), *_log_header(job), *_requested(job.request)]


def _placement(job: BatchJob) -> Iterator[str]:
    yield header_word("--job-name", job.name)
    yield f"--nodes={job.nodes}"
    # The launcher runs on the first node, and starts an agent on each.
    yield "--ntasks=1" if job.nodes == 1 else "--ntasks-per-node=1"
    yield f"--gres=gpu:{job.gpus}"
    yield "--exclusive" if job.gpus == NODE_GPUS else f"--cpus-per-gpu={job.cpus_per_gpu}"
    yield "--export=ALL"


def _log_header(job: BatchJob) -> Iterator[str]:
    pattern = log_pattern(job.paths)
    if not _CONTROL.search(pattern):
        yield header_word("--output", pattern)
        yield header_word("--error", pattern)
    # A requeued job keeps its number and would overwrite the log of the first attempt.
    yield "--open-mode=append"


def _requested(request: SlurmRequest) -> Iterator[str]:
    for option in fields(SlurmRequest):
        value = getattr(request, option.name)
        if isinstance(value, str):
            yield header_word(f"--{option.name}", value)
    if request.requeue:
        yield "--requeue"
    yield from _warning(request)
    for argument in request.sbatch_arg:
        if not argument.startswith("-"):
            raise UsageError(f"--sbatch-arg {argument!r}: write a whole option of sbatch, as in --sbatch-arg=--requeue")
        if _ARRAY.match(argument):
            raise UsageError(f"--sbatch-arg {argument!r}: {NO_ARRAYS}")
        if request.requeue and _NO_REQUEUE.match(argument):
            raise UsageError(f"--requeue, --sbatch-arg {argument!r}: leave out one or the other")
        if _LOG.match(argument):
            raise UsageError(f"--sbatch-arg {argument!r}: {OWN_LOG}")
        name, equals, value = argument.partition("=")
        yield header_word(name, value) if equals else _header_quote("--sbatch-arg", argument)


def _warning(request: SlurmRequest) -> Iterator[str]:
    """The signal before the time limit. It goes to the batch shell alone, which the launcher has replaced."""
    limit_s = None if request.time is None else walltime_s(request.time)
    lead_s = request.signal_before or STOP_LEAD_S
    if limit_s and limit_s <= lead_s and (request.requeue or request.signal_before):
        raise UsageError(f"--time {request.time} is not longer than the {lead_s} s of --signal-before")
    # SIGTERM may also mean that the job is cancelled, which a job must not answer with its requeue.
    if request.requeue:
        yield f"--signal=B:USR2@{lead_s}"
    elif request.signal_before or (limit_s is not None and limit_s >= _SHORTEST_TIME_WITH_LEAD_S):
        yield f"--signal=B:TERM@{lead_s}"


def render(job: BatchJob) -> str:
    """The batch script.

    Raises:
        UsageError: see `header`; or the user's template cannot be rendered.
    """
    from jinja2 import FileSystemLoader, PackageLoader, StrictUndefined, TemplateError, TemplateSyntaxError
    from jinja2.sandbox import SandboxedEnvironment

    own = job.template
    environment = SandboxedEnvironment(
        loader=PackageLoader("medarc_rl", "slurm_templates") if own is None else FileSystemLoader(own.parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["sh"] = sh_quote
    name = "job.j2" if own is None else own.name
    values = {"job": job, "header": header(job), "no_arrays": NO_ARRAYS}
    try:
        script = environment.get_template(name).render(_names_of_prime_rl(job) | values)
    except (TemplateError, ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        if own is None:
            raise
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise UsageError(f"slurm.template_path {own}{line}: {one_line(str(error))}") from error
    if not script.startswith("#!"):
        raise UsageError(f"slurm.template_path {own}: the script must begin with #!, as in #!/bin/bash")
    return script


def _names_of_prime_rl(job: BatchJob) -> dict[str, object]:
    """The variables of PRIME-RL's templates."""
    config = (job.queued or job.paths).config(CONFIGS[job.command])
    return {
        "config_path": config,
        "config_dir": config.parent,
        "job_name": job.name,
        "project_dir": job.project_dir,
        "partition": job.request.partition or "",
        "output_dir": job.paths.root,
        "orchestrator_output_dir": job.paths.orchestrator.root,
        "gpus_per_node": job.gpus,
        "num_nodes": job.nodes,
        "num_train_nodes": job.nodes - job.infer_nodes,
        "num_infer_nodes": job.infer_nodes,
        "num_teacher_nodes": 0,
    }


def sbatch_argv(job: BatchJob) -> list[str]:
    """The command that submits the script. It does not repeat options of the script's header."""
    pattern = log_pattern(job.paths)
    log = [f"--output={pattern}", f"--error={pattern}"] if _CONTROL.search(pattern) else []
    return ["sbatch", *log, str(job.script)]


def sbatch_env(env: Mapping[str, str], job: BatchJob) -> dict[str, str]:
    """The environment to submit a job with.

    It lacks variables that would win over the script's header, such as the SBATCH_PARTITION of a login script, and what
    a job that this process is part of would pass on: its array, how often it has started and how often it may.

    Raises:
        UsageError: the environment makes each job an array; or see `header`.
    """
    if array := env.get("SBATCH_ARRAY_INX"):
        raise UsageError(f"SBATCH_ARRAY_INX={array}: {NO_ARRAYS}")
    options = [option.partition("=")[0] for option in header(job)]
    dropped = {f"SBATCH_{name}" for option in options for name in _variables(option)} | _OF_A_JOB
    return {name: value for name, value in env.items() if name not in dropped and not name.startswith("SLURM_ARRAY_")}


def _variables(option: str) -> tuple[str, ...]:
    return _VARIABLES.get(option, (option.removeprefix("--").upper().replace("-", "_"),))
