"""`medarc_slurm sft|rl`: resolve a config, write a batch script, submit it. `medarc_slurm check`: only look."""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from medarc_rl.backends.containers import RUNTIMES, Container
from medarc_rl.backends.launcher import CONFIGS, launcher_job
from medarc_rl.backends.slurm import (
    BatchJob,
    SlurmRequest,
    check_dependency,
    log_file,
    render,
    sbatch_argv,
    sbatch_env,
    sh_quote,
)
from medarc_rl.backends.slurm_jobs import LOG
from medarc_rl.cli import NODE_GPUS, Resume, add_command, add_command_without_config, new_app, resume_words, say, warn
from medarc_rl.commands.estimating import EstimateOptions, print_rl_estimate, print_sft_estimate
from medarc_rl.deployment import (
    RlNodes,
    advice,
    check_rl,
    frozen_gpus,
    rl_nodes,
    rl_split,
    sft_gpus,
    sft_nodes,
    sft_owned,
    training_gpus,
)
from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.jobs.command import CancelOptions, LogsOptions, StatusOptions, cancel, logs, status
from medarc_rl.jobs.kinds import job_kind
from medarc_rl.jobs.record import JobRecord, circumstances
from medarc_rl.jobs.recording import record_job
from medarc_rl.utils import (
    GivenConfig,
    Run,
    check_startable,
    load_run,
    maybe_autoset_auth_env,
    prepare_directory,
    refuse_other_launcher,
    reporting_directory_errors,
    write_components,
)
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.shared import SlurmConfig
from prime_rl.launch.job import Resources
from prime_rl.run.access import files_readable_by
from prime_rl.run.paths import RunPaths
from prime_rl.utils.files import replacing_file

Option = typer.Option
MOST_NODES = 1024
_SUBMITTED = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;\S*| on cluster \S+)?$", re.MULTILINE)
"""What sbatch says, with `--parsable` too. A cluster's own words, about a budget say, may stand before it."""


@dataclass(frozen=True, kw_only=True)
class JobOptions(SlurmRequest):
    """Options of all commands."""

    output_dir: Annotated[Path | None, Option(help="Directory of the run, OUT.")] = None
    resume: Resume = None
    job_name: Annotated[str | None, Option(help="Name of the job; by default <config stem>-sft or -rl.")] = None
    project_dir: Annotated[Path, Option(help="Directory that the job runs in, with .venv, maybe .env.")] = Path()
    setup: Annotated[
        Path | None,
        Option(help="File of bash commands that the job reads first, as `module load cuda` or `conda activate x`."),
    ] = None
    container: Annotated[
        str | None, Option(help="Image to run in, instead of the project's .venv; it has this package installed.")
    ] = None
    container_runtime: Annotated[str, Option(help=f"{' or '.join(RUNTIMES)}.")] = RUNTIMES[0]
    container_mount: Annotated[
        list[str], Option(help="One more directory in the container, SOURCE or SOURCE:TARGET; may be repeated.")
    ] = field(default_factory=list)
    hf_cache_dir: Annotated[
        Path | None, Option(help="Hugging Face cache; by default $HF_HOME, else <project dir>/.hf_cache.")
    ] = None
    hf_hub_offline: Annotated[bool, Option(help="Let the job only read the cache.")] = False
    auto_auth: Annotated[
        bool, Option(help="Give the job HF_TOKEN, from the environment or the local Hugging Face login.")
    ] = False
    cpus_per_gpu: Annotated[int, Option(min=1, max=32, help=f"CPUs per GPU; all of them with {NODE_GPUS}.")] = 8


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(EstimateOptions, JobOptions):
    dry_run: Annotated[bool, Option("--dry-run", help="Write the config and the script; do not submit.")] = False
    check: Annotated[
        bool, Option("--check/--no-check", help="Do not submit a job that `medarc_slurm check` finds fault with.")
    ] = True


@dataclass(frozen=True, kw_only=True)
class SftGpus:
    gpus: Annotated[
        int | None, Option(min=1, max=NODE_GPUS, help="GPUs of each node; by default those of deployment.")
    ] = None
    nodes: Annotated[
        int | None, Option(min=1, max=MOST_NODES, help="Nodes; by default deployment.num_nodes, or 1.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class RlGpus:
    train_gpus: Annotated[
        int | None, Option(min=1, max=NODE_GPUS, help="GPUs of the trainer, 1 to 4 of one node; by default 1.")
    ] = None
    infer_gpus: Annotated[
        int | None, Option(min=1, max=NODE_GPUS, help="GPUs of the inference server; by default 1.")
    ] = None
    single_gpu: Annotated[bool, Option("--single-gpu", help="One GPU for both.")] = False
    train_nodes: Annotated[
        int | None,
        Option(min=1, max=MOST_NODES, help="Nodes of the trainer alone. --train-gpus then counts per node."),
    ] = None
    infer_nodes: Annotated[
        int | None,
        Option(min=1, max=MOST_NODES, help="Nodes of inference alone, with one server each. --infer-gpus: per node."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SftOptions(SftGpus, SubmitOptions):
    """Options of `sft`."""


@dataclass(frozen=True, kw_only=True)
class RlOptions(RlGpus, SubmitOptions):
    """Options of `rl`."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions(RlGpus, SftGpus, JobOptions):
    """Options of `check`: those of the command whose job is checked."""

    json: Annotated[bool, Option("--json", help="Print JSON.")] = False


app = new_app("medarc_slurm", "Submit a run to Slurm, from a TOML file.")


def sft(words: list[str], options: SftOptions) -> int:
    """Submit supervised fine-tuning."""
    job, run = plan_sft_job(words, options, options)
    if options.estimate:
        return print_sft_estimate(run.config, training_gpus(run.config), options, in_job=True)
    with files_readable_by(run.config.file_access):
        return write_and_submit(job, run, options)


def rl(words: list[str], options: RlOptions) -> int:
    """Submit reinforcement learning."""
    job, run = plan_rl_job(words, options, options)
    if options.estimate:
        return print_rl_estimate(run.config, job.single_gpu, options, in_job=True)
    with files_readable_by(run.config.file_access):
        return write_and_submit(job, run, options)


def check(words: list[str], options: CheckOptions) -> int:
    """Check all that a job needs, and submit nothing.

    CONFIG and the options are those of `sft` or `rl`; where the file fits both, write `check sft` or `check rl`. Exit
    code: 0 if everything is there, 1 if something is not, 2 if the config cannot be used.
    """
    kind, words = job_kind(words)
    refuse_options_of_the_other(kind, options)
    job, run = plan_rl_job(words, options, options) if kind == "rl" else plan_sft_job(words, options, options)
    check_startable(run, dry_run=False, job_dir=job.project_dir, waits=job.queued is not None)
    env = dict(os.environ)
    maybe_autoset_auth_env(env, options.auto_auth)
    return 0 if is_ready(job, run, env, options.json) else 1


add_command(app, "sft", SftOptions, sft)
add_command(app, "rl", RlOptions, rl)
add_command(app, "check", CheckOptions, check)
add_command_without_config(app, "status", StatusOptions, status)
add_command_without_config(app, "logs", LogsOptions, logs)
add_command_without_config(app, "cancel", CancelOptions, cancel)


def plan_sft_job(words: list[str], gpus: SftGpus, options: JobOptions) -> tuple[BatchJob, Run[SFTConfig]]:
    given = GivenConfig.read(SFTConfig, [*words, *resume_words(options.resume)])
    run = load_run(given, "sft", options.output_dir, sft_owned(given, gpus.gpus, gpus.nodes), submits=True)
    refuse_other_launcher(run.config, "slurm", given.words)
    return plan_job("sft", run, options, Resources(sft_nodes(run.config), sft_gpus(run.config))), run


def refuse_options_of_the_other(kind: str, options: CheckOptions) -> None:
    """Raises UsageError for GPUs or nodes that only the other command takes."""
    own, other = (RlGpus, SftGpus) if kind == "rl" else (SftGpus, RlGpus)
    given = [each.name for each in fields(other) if getattr(options, each.name) != each.default]
    if given:
        raise UsageError(f"{_listed(given)}: no option of {kind}, which takes {_listed(f.name for f in fields(own))}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def plan_rl_job(words: list[str], gpus: RlGpus, options: JobOptions) -> tuple[BatchJob, Run[RLConfig]]:
    given = GivenConfig.read(RLConfig, [*words, *resume_words(options.resume)])
    nodes = rl_nodes(given, (gpus.train_nodes, gpus.infer_nodes), (gpus.train_gpus, gpus.infer_gpus), gpus.single_gpu)
    split = nodes or rl_split(given, gpus.train_gpus, gpus.infer_gpus, gpus.single_gpu)
    run = load_run(given, "rl", options.output_dir, split.owned, submits=True)
    refuse_other_launcher(run.config, "slurm", given.words)
    check_rl(run.config, split)
    if isinstance(split, RlNodes):
        job = plan_job("rl", run, options, Resources(split.total, split.gpus_per_node))
        return replace(job, infer_nodes=split.infer), run
    for line in advice(run.config, split):
        warn(line)
    return plan_job(
        "rl", run, options, Resources(1, split.total + frozen_gpus(run.config)), single_gpu=split.single_gpu
    ), run


def plan_job(
    command: str, run: Run[Any], options: JobOptions, resources: Resources, single_gpu: bool = False
) -> BatchJob:
    """Decide everything that the script contains. Raises UsageError if the project directory does not exist."""
    options, template = with_slurm_section(options, run.config.slurm)
    project_dir = options.project_dir.absolute()
    if not project_dir.is_dir():
        raise UsageError(f"--project-dir {project_dir}: no such directory")
    if options.setup is not None and not options.setup.is_file():
        raise UsageError(f"--setup {options.setup}: no such file")
    if options.dependency is not None:
        check_dependency(options.dependency)
    if options.dependency is not None and run.config.clean_output_dir:
        raise UsageError(
            "--clean-output-dir would remove the files of the run that --dependency waits for: leave it out"
        )
    queued = next_queued(run.paths) if options.dependency is not None else None
    hf_cache_dir = options.hf_cache_dir or os.environ.get("HF_HOME") or project_dir / ".hf_cache"
    return BatchJob(
        job=launcher_job(command, run.paths, resources, queued),
        name=options.job_name or f"{run.stem}-{command}",
        cpus_per_gpu=options.cpus_per_gpu,
        project_dir=project_dir,
        hf_cache_dir=Path(hf_cache_dir).absolute(),
        hf_hub_offline=options.hf_hub_offline,
        single_gpu=single_gpu,
        checkpoints=bool(run.checkpoints),
        setup=options.setup.absolute() if options.setup is not None else None,
        container=container_of(options),
        queued=queued,
        template=template,
        request=options,
    )


def with_slurm_section(options: JobOptions, section: SlurmConfig | None) -> tuple[JobOptions, Path | None]:
    """The options, with what only `[slurm]` says, and the template of the script. None takes our own.

    Raises:
        UsageError: there is no such template.
    """
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


def container_of(options: JobOptions) -> Container | None:
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
    """Where the next job of a chain keeps its script and config."""
    return next(queued for number in itertools.count(1) if not (queued := paths.queued(number)).root.exists())


def write_and_submit(job: BatchJob, run: Run[Any], options: SubmitOptions) -> int:
    """Check, write config and script, submit unless this is a dry run, and return the exit code.

    Raises:
        MedarcError: something that the job needs is not there, or sbatch refuses it.
    """
    dry_run = options.dry_run or run.config.dry_run
    check_startable(run, dry_run, job.project_dir, waits=job.queued is not None)
    env = dict(os.environ)
    for line in maybe_autoset_auth_env(env, options.auto_auth and not dry_run):
        say(line)
    if options.check and not dry_run and not is_ready(job, run, env):
        raise MedarcError("nothing was submitted: see FAILED above, or submit all the same with --no-check")
    write_job(job, run, dry_run)
    if dry_run:
        say(" ".join(map(sh_quote, sbatch_argv(job))))
        return 0
    submit(job, run, env)
    return 0


def is_ready(job: BatchJob, run: Run[Any], env: Mapping[str, str], as_json: bool = False) -> bool:
    """Print the table of what the job needs. Returns whether all of it is there."""
    # Imported here: a dry run asks nobody.
    from medarc_rl.readiness.report import can_start, job_rows
    from medarc_rl.readiness.rows import as_table, table

    rows = list(job_rows(run.config, job, env))
    for line in [json.dumps(as_table(rows), indent=1)] if as_json else table(rows):
        say(line)
    return can_start(rows)


def write_job(job: BatchJob, run: Run[Any], dry_run: bool) -> None:
    """Write config and script."""
    script = render(job)
    if run.config.clean_output_dir and not dry_run:
        prepare_directory(run)
    component, place = CONFIGS[job.command], job.queued or run.paths
    if job.queued is not None:
        with reporting_directory_errors():
            # Another submission may have taken the number meanwhile.
            job.queued.root.mkdir(parents=True)
    write_components(replace(run, paths=place), {component: run.config}, dry_run)
    with reporting_directory_errors():
        run.paths.slurm.mkdir(parents=True, exist_ok=True)
        with replacing_file(job.script) as scratch:
            scratch.write_text(script, encoding="utf-8")
            scratch.chmod(scratch.stat().st_mode | stat.S_IXUSR)
    say(f"config: {place.config(component)}")
    say(f"script: {job.script}")


def submit(job: BatchJob, run: Run[Any], env: dict[str, str]) -> None:
    """Submit the script, and record the job.

    Raises:
        MedarcError: there is no `sbatch`, or it refuses the script.
    """
    argv, job_env = sbatch_argv(job), sbatch_env(env, job)
    try:
        answer = subprocess.run(argv, env=job_env, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        complaint = "not found: submit where Slurm is, or run here with medarc_train" if absent else error.strerror
        raise MedarcError(f"sbatch: {complaint}", f"nothing was submitted; the script stays: {job.script}") from error
    said, complained = (answer.stdout or "").strip(), (answer.stderr or "").strip()
    job_id = _SUBMITTED.search(said)
    if answer.returncode != 0 and job_id is None:
        complaints = complained.splitlines() or [f"sbatch ended with exit code {answer.returncode}"]
        raise MedarcError(*complaints, f"nothing was submitted; the script stays: {job.script}")
    for line in complained.splitlines():
        warn(line)
    say(said)
    if job_id is None:
        warn("sbatch did not say the number of the job, so it is not in the job log")
    else:
        say(f"log: {log_file(job.paths, job_id[1])}")
        record_job(submitted(job, run, job_id[1]))
    if answer.returncode != 0:
        raise MedarcError(f"the job that sbatch was told to wait for ended with exit code {answer.returncode}")


def submitted(job: BatchJob, run: Run[Any], job_id: str) -> JobRecord:
    """What the job log keeps about a job."""
    return JobRecord(
        name=job.name,
        backend="slurm",
        id=job_id,
        kind=job.command,
        config=" ".join(map(str, run.files)),
        output=str(job.paths.root),
        details={LOG: str(log_file(job.paths, job_id))},
        **circumstances("medarc_slurm"),
    )


def main() -> None:
    app()
