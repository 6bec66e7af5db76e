"""A batch job as a value: planned from a request, and rendered as the script that sbatch takes.

The script wraps one launcher, which plans the run's processes on the node. It mixes three syntaxes. The body is bash
(`sh_quote`). sbatch reads the header, and understands `"` and `\\` but no other shell syntax (`header_word`). The name
of the log is a `%` pattern (`log_pattern`). Templates in `slurm_templates` print the values and decide nothing.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from medarc_rl.backends.options import (
    MAX_REQUEUES,
    NODE_GPUS,
    RUNTIMES,
    SHORTEST_TIME_WITH_LEAD_S,
    STOP_LEAD_S,
    Runtime,
    SlurmOptions,
    SlurmRequest,
)
from medarc_rl.backends.protocol import CONFIGS, LAUNCHERS, Request
from medarc_rl.cli import warn
from medarc_rl.deployment import advice, check_rl, gpus_of_nodes
from medarc_rl.errors import UsageError
from medarc_rl.utils import (
    Run,
)
from prime_rl.configs.shared import SlurmConfig
from prime_rl.launch.job import Job, Resources
from prime_rl.launch.spec import ProcessSpec
from prime_rl.run.paths import RunPaths
from prime_rl.utils.errors import one_line

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PLAIN_HEADER = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]-]+")
_CONDITION = r"(?:after(?:ok|notok|any|corr)?(?::\d+(?:_(?:\d+|\*))?(?:\+\d+)?)+|singleton)"
_DEPENDENCY = re.compile(rf"{_CONDITION}(?:(?:,{_CONDITION})*|(?:\?{_CONDITION})*)", re.ASCII)
"""After commas, all conditions must hold; after question marks, one. `after:1+5` is five minutes after job 1 began."""
_ARRAY = re.compile(r"--ar|-[HhIkOQsvWX]*a")
"""sbatch's `--array`, abbreviated, or as `-a` after other letters."""
_NO_REQUEUE = re.compile(r"--no-r")
"""sbatch's `--no-requeue`, abbreviated."""
_SIGNAL = re.compile(r"--sig")
"""sbatch's `--signal`, abbreviated."""
_LOG = re.compile(r"--(?:ou|er)|-[HhIkOQsvWX]*[oe]")
"""sbatch's `--output` and `--error`, in the same ways."""
_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "--gres": ("GRES", "GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK"),
    "--mem": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"),
    "--requeue": ("REQUEUE", "NO_REQUEUE"),
    "--time": ("TIMELIMIT",),
}
"""Variables of sbatch, without `SBATCH_`, that have another name than their option, or contradict it."""
_OF_A_JOB = ("SLURM_", "PMI_", "PMI2_", "PMIX_", "SRUN_", "MEDARC_MAX_REQUEUES")
"""Beginnings of the variables of the job and step that this process may be part of. They must not reach the new one:
its `srun` reads SLURM_CPU_BIND, SLURM_MEM_PER_CPU and the like as options, and binds to the submitter's cores."""
_OF_ANY_JOB = ("SLURM_ARRAY_", "SLURM_RESTART_COUNT", "MEDARC_MAX_REQUEUES")
_OF_THE_USER = {
    "SLURM_CONF",
    "SLURM_CONF_SERVER",
    "SLURM_ACCOUNT",
    "SLURM_CLUSTERS",
    "SLURM_EXIT_ERROR",
    "SLURM_EXIT_IMMEDIATE",
    "SLURM_JWT",
    "SLURM_TIME_FORMAT",
    "SLURM_UMASK",
    "SLURM_SACK_KEY",
    "SLURM_SACK_JWKS",
}
"""Variables that say how to reach Slurm, or that people set for all of their jobs."""
SIGNAL_SLACK_S = 60
"""By so many seconds Slurm may send its warning early."""
NO_ARRAYS = (
    "the tasks of a job array would share one directory: submit one job for each task, with its own --output-dir"
)
OWN_LOG = "a job's log is in OUT/slurm, where `medarc_jobs logs` looks for it: leave this out, or link to that folder"
_WALLTIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
_ACCOUNT_VARIABLES = ("SBATCH_ACCOUNT", "SLURM_ACCOUNT")


@dataclass(frozen=True, slots=True)
class Container:
    """An image with Python and this package installed."""

    image: str
    """A file, or what the runtime pulls, such as `docker://...` or `nvcr.io#...`."""
    runtime: Runtime = "apptainer"
    mounts: tuple[str, ...] = ()
    """More directories, as `SOURCE` or `SOURCE:TARGET`."""

    def wrap(self, argv: Sequence[str], directory: Path, mounts: Sequence[Path]) -> tuple[str, ...]:
        """The command that runs `argv` in the container, in `directory`, with these directories under their own paths.

        Raises:
            UsageError: the runtime's notation cannot hold the name of a directory.
        """
        if self.image.startswith("-"):
            raise UsageError(f"--container {self.image!r}: name an image")
        mapped = [*(_itself(path) for path in dict.fromkeys(mounts)), *self.mounts]
        if self.runtime == "pyxis":
            return (
                "srun",
                "--ntasks=1",
                f"--container-image={self.image}",
                f"--container-mounts={','.join(mapped)}",
                f"--container-workdir={directory}",
                *argv,
            )
        binds = (word for mount in mapped for word in ("--bind", mount))
        return ("apptainer", "exec", "--nv", *binds, "--pwd", str(directory), self.image, *argv)


def _itself(path: Path) -> str:
    if set(str(path)) & set(":,"):
        raise UsageError(f"{path}: containers cannot mount a directory with ':' or ',' in its name")
    return f"{path}:{path}"


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job, and how Slurm runs it."""

    job: Job
    name: str
    cpus_per_gpu: int
    project_dir: Path
    hf_cache_dir: Path
    hf_hub_offline: bool = False
    shares_gpus: bool = False
    """Each GPU serves and trains (`rl` only)."""
    checkpoints: bool = False
    """Whether the run writes checkpoints, from which a requeued job can resume."""
    setup: Path | None = None
    """File of bash commands that prepares the job's shell, such as `module load cuda`."""
    container: Container | None = None
    """The image that the launcher runs in. None uses the project's `.venv`."""
    queued: RunPaths | None = None
    """Directory of the script and config of a job that waits for another one of the same run. None: the run's own."""
    template: Path | None = None
    """The user's own template of the script. None takes ours."""
    infer_nodes: int = 0
    """Nodes of inference alone. The others train."""
    request: SlurmRequest = field(default_factory=SlurmRequest)

    def __post_init__(self) -> None:
        """Raises UsageError for a job that could not start, or not continue after a requeue."""
        if self.request.max_requeues != MAX_REQUEUES and not self.request.requeue:
            raise UsageError(f"--max-requeues {self.request.max_requeues} has an effect only with --requeue: add it")
        if self.request.requeue and not self.checkpoints:
            raise UsageError("--requeue needs checkpoints to continue from: add a [ckpt] table, or --ckpt.interval N")
        if self.request.requeue and self.container is not None:
            raise UsageError(
                "--requeue: a job in a container cannot requeue itself, because it has no scontrol; leave the "
                "container out, or let Slurm requeue the job with --sbatch-arg=--requeue"
            )
        if self.nodes > 1 and self.container is not None:
            raise UsageError(
                "--container: agents on several nodes are started with srun, which no container has: leave it out and "
                "keep the environment in a directory that the nodes share, or run on one node"
            )

    @property
    def command(self) -> str:
        """`sft`, `dpo`, `rm` or `rl`: names the script."""
        return self.job.command

    @property
    def paths(self) -> RunPaths:
        return self.job.paths

    @property
    def nodes(self) -> int:
        return self.job.resources.nodes

    @property
    def gpus(self) -> int:
        """Number of GPUs of each node."""
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


# Planning: from the request to a batch job, as a value.


def plan(request: Request) -> tuple[BatchJob, Run[Any]]:
    """Load the config and decide everything that the script contains. Writes nothing.

    Raises:
        UsageError: one line for each fault.
    """
    if request.kind == "eval":
        raise UsageError(
            "--to slurm: submits only sft, dpo, rm and rl; for an evaluation, run `medarc_train eval` in your own job"
        )
    if request.gpus == 0:
        raise UsageError("--gpus 0: a Slurm job always requests GPUs, even for a run on CPUs; leave --gpus out")
    output_dir = None if request.output_dir is None else Path(request.output_dir)
    run = request.load("slurm", output_dir, submits=True)
    if request.kind == "rl":
        check_rl(run.config)
        for line in [] if request.split is None else advice(run.config, request.split):
            warn(line)
    options, template = with_slurm_section(request.options, request.name, run.config.slurm)
    project_dir = options.project_dir.absolute()
    if not project_dir.is_dir():
        raise UsageError(f"--project-dir {project_dir}: no such directory")
    if options.setup is not None and not options.setup.is_file():
        raise UsageError(f"--setup {options.setup}: no such file")
    if options.dependency is not None:
        check_dependency(options.dependency)
        if run.config.clean_output_dir:
            raise UsageError(
                "--clean-output-dir would remove the files of the run that --dependency waits for: leave it out"
            )
    queued = next_queued(run.paths) if options.dependency is not None else None
    hf_cache_dir = options.hf_cache_dir or os.environ.get("HF_HOME") or project_dir / ".hf_cache"
    gpus, deployment = gpus_of_nodes(run.config, request.shares_gpus), run.config.deployment
    job = BatchJob(
        # All nodes of a job have the same number of GPUs.
        job=launcher_job(request.kind, run.paths, Resources(len(gpus), gpus[0]), queued),
        name=options.job_name or f"{run.stem}-{request.kind}",
        cpus_per_gpu=options.cpus_per_gpu,
        project_dir=project_dir,
        hf_cache_dir=Path(hf_cache_dir).absolute(),
        hf_hub_offline=options.hf_hub_offline,
        shares_gpus=request.shares_gpus,
        checkpoints=bool(run.checkpoints),
        setup=options.setup.absolute() if options.setup is not None else None,
        container=container_of(options),
        queued=queued,
        template=template,
        infer_nodes=deployment.num_infer_nodes if request.kind == "rl" and deployment.type == "multi_node" else 0,
        request=options,
    )
    return job, run


def with_slurm_section(
    options: SlurmOptions, name: str | None, section: SlurmConfig | None
) -> tuple[SlurmOptions, Path | None]:
    """Fill in options from the environment and `[slurm]`. Also returns the user's template; None takes our own.

    Raises:
        UsageError: there is no such template.
    """
    account = next(filter(None, (options.account, *map(os.environ.get, _ACCOUNT_VARIABLES))), None)
    options = replace(options, account=account, job_name=options.job_name or name)
    if section is None:
        return options, None
    said = section.model_fields_set
    template = section.template_path
    if template is not None and not template.is_file():
        raise UsageError(f"slurm.template_path {template}: no such file")
    changes: dict[str, Any] = {
        "job_name": options.job_name or (section.job_name if "job_name" in said else None),
        "partition": options.partition or (section.partition if "partition" in said else None),
        "project_dir": section.project_dir if options.project_dir == Path() else options.project_dir,
    }
    return replace(options, **changes), template


def container_of(options: SlurmOptions) -> Container | None:
    """Raises UsageError for a runtime that is not known."""
    runtime = next((known for known in RUNTIMES if known == options.container_runtime), None)
    if runtime is None:
        raise UsageError(f"--container-runtime {options.container_runtime!r}: {' or '.join(RUNTIMES)}")
    if not options.container:
        # An empty variable of a shell, as in `--container "$IMAGE"`, is no image.
        if options.container is not None or options.container_mount:
            raise UsageError("--container: name an image, or leave it and --container-mount out")
        return None
    return Container(options.container, runtime, tuple(options.container_mount))


def next_queued(paths: RunPaths) -> RunPaths:
    """Directory of the script and config of the next job of a chain."""
    return next(queued for number in itertools.count(1) if not (queued := paths.queued(number)).root.exists())


def launcher_job(command: str, paths: RunPaths, resources: Resources, queued: RunPaths | None = None) -> Job:
    """A job whose only process launches `command` on the first of its nodes. It starts an agent on each.

    Its config is that of the run, or the one in `queued`.

    GPU ids, ports and scratch directories are only known on the node, so the launcher chooses them.
    """
    argv = ("python", "-m", *LAUNCHERS[command], "@", str((queued or paths).config(CONFIGS[command])))
    launcher = ProcessSpec(command, argv, paths.log(command), completes_run=True)
    return Job(command, paths, (launcher,), resources)


def sbatch_argv(job: BatchJob) -> list[str]:
    """The command that submits the script. It does not repeat options of the script's header."""
    pattern = log_pattern(job.paths)
    log = [f"--output={pattern}", f"--error={pattern}"] if _CONTROL.search(pattern) else []
    return ["sbatch", *log, str(job.script)]


def sbatch_env(env: Mapping[str, str], job: BatchJob) -> dict[str, str]:
    """The environment to submit a job with.

    It lacks variables that would win over the script's header, such as the SBATCH_PARTITION of a login script, and
    those of a job that this process is part of: its number, cores and memory, how often it has started and may start.

    Raises:
        UsageError: the environment makes each job an array; or see `header`.
    """
    if array := env.get("SBATCH_ARRAY_INX"):
        raise UsageError(f"SBATCH_ARRAY_INX={array}: {NO_ARRAYS}")
    dropped: set[str] = set()
    for option in (word.partition("=")[0] for word in header(job)):
        names = _VARIABLES.get(option, (option.removeprefix("--").upper().replace("-", "_"),))
        dropped |= {f"SBATCH_{name}" for name in names}
    # Outside a job, people set such variables for the jobs that they submit.
    passed_on = _OF_A_JOB if {"SLURM_JOB_ID", "SLURM_JOBID"} & env.keys() else _OF_ANY_JOB
    return {
        name: value
        for name, value in env.items()
        if name not in dropped and (name in _OF_THE_USER or not name.startswith(passed_on))
    }


# The script: its header is sbatch's, its body bash.


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
        if request.requeue and _SIGNAL.match(argument):
            raise UsageError(
                f"--sbatch-arg {argument!r}: --requeue needs its own signal, after which the run saves and the job "
                "starts again; leave this out, and set the time with --signal-before"
            )
        if _LOG.match(argument):
            raise UsageError(f"--sbatch-arg {argument!r}: {OWN_LOG}")
        name, equals, value = argument.partition("=")
        yield header_word(name, value) if equals else _header_quote("--sbatch-arg", argument)


def _warning(request: SlurmRequest) -> Iterator[str]:
    """The signal before the time limit. It goes to the batch shell alone, which the launcher has replaced."""
    limit_s = None if request.time is None else walltime_s(request.time)
    lead_s = request.signal_before or STOP_LEAD_S
    # Slurm sends the signal up to a minute early (its man page of sbatch), so a shorter job is warned as it starts.
    if limit_s and limit_s <= lead_s + SIGNAL_SLACK_S and (request.requeue or request.signal_before):
        raise UsageError(
            f"--time {request.time} leaves no time to train: Slurm warns the run {lead_s} s (--signal-before) before "
            f"the end, and up to {SIGNAL_SLACK_S} s earlier; give it more time, or a smaller --signal-before"
        )
    # SIGTERM may also mean that the job is cancelled, which a job must not answer with its requeue.
    if request.requeue:
        yield f"--signal=B:USR2@{lead_s}"
    elif request.signal_before or (limit_s is not None and limit_s >= SHORTEST_TIME_WITH_LEAD_S):
        yield f"--signal=B:TERM@{lead_s}"


def check_dependency(text: str) -> None:
    """Refuse a dependency that Slurm cannot parse. Slurm itself would refuse it only at the submission.

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


def log_pattern(paths: RunPaths) -> str:
    """The path of a job's log, in the pattern language of `sbatch --output`.

    A backslash anywhere in the pattern disables `%` signs; then all jobs append to one file.
    """
    if "\\" in str(paths.slurm):
        return str(log_file(paths, "")).replace("\\", "\\\\")
    return str(paths.slurm).replace("%", "%%") + "/job_%j.log"


def log_file(paths: RunPaths, job_id: str) -> Path:
    """The file that `log_pattern` means for one job."""
    return paths.slurm / ("job.log" if "\\" in str(paths.slurm) else f"job_{job_id}.log")


def header_word(option: str, value: str) -> str:
    """`option=value` as sbatch reads it from a script's header.

    Raises:
        UsageError: the header cannot contain the value, for example because of a line break.
    """
    return f"{option}={_header_quote(option, value)}"


def _header_quote(option: str, value: str) -> str:
    if _CONTROL.search(value) or not _is_utf8(value):
        raise UsageError(
            f"{option} {value!r}: remove control characters and invalid UTF-8, which Slurm does not accept in a "
            "script's header"
        )
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


def sh_quote(value: object) -> str:
    """Quote `value` as one bash word on one line. Control characters are escaped: sbatch refuses carriage returns."""
    text = str(value)
    if not _CONTROL.search(text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", escaped) + "'"
