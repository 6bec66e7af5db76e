"""What a launch does in a Slurm job besides running: it heads the job's log, and requeues the job if it was stopped."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from medarc_rl.backends.slurm.queue import Properties, requeue, shown
from medarc_rl.external import NoAnswer, ask
from prime_rl.run.checkpoints import SavedSteps
from prime_rl.run.paths import RunPaths
from prime_rl.utils.terminal import say

JOB_VARIABLE = "SLURM_JOB_ID"
MAX_REQUEUES_VARIABLE = "MEDARC_MAX_REQUEUES"
"""How often the job may start again. Not set: the launcher requeues nothing."""

MAX_STARTS_WITHOUT_PROGRESS = 3
"""Starts of a job in a row that may end with the checkpoint that they began with."""
RUN_VARIABLE = "OUTPUT_DIR"
"""The run's directory. The batch script sets it."""
WARNED = 128 + signal.SIGUSR2
"""Exit code of a launch that Slurm's warning before the time limit has stopped."""
TERMINATED = 128 + signal.SIGTERM

_LOOK_LIMIT_S = 10.0
_REQUEUE_LIMIT_S = 60.0
_PACKAGES = ("torch", "transformers", "vllm", "verifiers")


def in_batch_job(launch: Callable[[], int], env: Mapping[str, str] = os.environ) -> int:
    """Launch, and return the exit code. Outside a Slurm job nothing else is done."""
    if JOB_VARIABLE not in env:
        return launch()
    for line in header_lines(env, Path.cwd()):
        say(line)
    code = launch()
    for line in requeue_if_stopped(code, env):
        say(line)
    return code


def header_lines(env: Mapping[str, str], project_dir: Path) -> Iterator[str]:
    """Where and what a job runs: its number, host, GPUs, code and packages."""
    attempt = int(env.get("SLURM_RESTART_COUNT") or 0) + 1
    yield f"job {env[JOB_VARIABLE]}, attempt {attempt}, on {socket.gethostname()}; {_end(env[JOB_VARIABLE])}"
    yield f"GPUs {env.get('CUDA_VISIBLE_DEVICES') or 'none'}; {_gpu_names()}"
    yield f"{_commit(project_dir)}; Python {sys.version.split()[0]}; {', '.join(map(_version, _PACKAGES))}"
    yield f"a checkpoint on demand: scancel --batch --signal=USR1 {env[JOB_VARIABLE]}"


def _end(job_id: str) -> str:
    try:
        jobs = shown("job", job_id, limit_s=_LOOK_LIMIT_S)
    except NoAnswer as error:
        return f"its time limit is unknown: {error}"
    return f"ends by {jobs[0].get('EndTime')}" if jobs else "its time limit is unknown"


def _gpu_names() -> str:
    try:
        answer = ask(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], _LOOK_LIMIT_S)
    except NoAnswer:
        return "no nvidia-smi"
    names = answer.stdout.splitlines() if answer.code == 0 else []
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or answer.last_line


def _commit(directory: Path) -> str:
    git = ["git", "-C", str(directory)]
    try:
        commit = ask([*git, "rev-parse", "--short=12", "HEAD"], _LOOK_LIMIT_S)
        changed = ask([*git, "status", "--porcelain", "--untracked-files=no"], _LOOK_LIMIT_S)
    except NoAnswer as error:
        return f"commit unknown: {error}"
    if commit.code != 0:
        return "commit unknown: no git repository"
    return f"commit {commit.stdout.strip()}{' with local changes' if changed.stdout else ''}"


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def requeue_if_stopped(code: int, env: Mapping[str, str]) -> Iterator[str]:
    """Requeue a job whose launch was stopped from outside, unless it is being cancelled. Yields what was done.

    A run that fails is not requeued: it would fail again.
    """
    bound = env.get(MAX_REQUEUES_VARIABLE)
    if bound is None or code not in (WARNED, TERMINATED):
        return
    count, job_id = int(env.get("SLURM_RESTART_COUNT") or 0), env[JOB_VARIABLE]
    by_hand = "to continue, submit it again with --resume latest"
    if count >= int(bound):
        yield f"not requeued: the job has already started again {count} times, as --max-requeues allows; {by_hand}"
        return
    if (starts := starts_without_progress(env)) >= MAX_STARTS_WITHOUT_PROGRESS:
        yield (
            f"not requeued: the last {starts} starts saved no new step, so the next would not either; give each more "
            f"time (--time), or save earlier (--ckpt.interval); {by_hand}"
        )
        return
    try:
        job = next(iter(shown("job", job_id, limit_s=_LOOK_LIMIT_S)), {})
        if int(job.get("Restarts", 0)) > count:
            yield f"Slurm itself requeues job {job_id}"
            return
        if not _may_go_on(job):
            yield f"not requeued: Slurm is ending the job, as after scancel; {by_hand}"
            return
        # Slurm ends this process, too. The word comes first.
        yield f"requeueing job {job_id} ({count + 1} of at most {bound} times)"
        answer = requeue(job_id, _REQUEUE_LIMIT_S)
    except NoAnswer as error:
        yield f"not requeued: {error}; {by_hand}"
        return
    if answer.code != 0:
        yield f"not requeued: {answer.last_line}; {by_hand}"


def starts_without_progress(env: Mapping[str, str]) -> int:
    """Number of this job's last starts that began with the newest step that is saved now. 0 if it is not known."""
    from prime_rl.history.attempts import read_attempts

    if not (root := env.get(RUN_VARIABLE)):
        return 0
    paths = RunPaths(Path(root))
    begun = [each.step or 0 for each in read_attempts(paths) if each.slurm_job == env[JOB_VARIABLE]]
    saved = max(SavedSteps.of(paths).complete, default=0)
    if not saved:  # a start that is stopped early leaves no receipt
        return int(env.get("SLURM_RESTART_COUNT") or 0) + 1
    return len(list(itertools.takewhile(lambda step: step >= saved, reversed(begun))))


def _may_go_on(job: Properties) -> bool:
    """Whether a job that stops is to start again. Slurm would also requeue a job that somebody cancels."""
    return job.get("JobState") == "RUNNING" or job.get("Reason") == "TimeLimit"
