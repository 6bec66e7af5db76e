"""Slurm after the submission: the state of a job, its log, cancelling, and the jobs that read a run's config.

The controller knows a job while it lives and a few minutes longer, the accounting database for months. Where a cluster
has no such database, the run's directory tells how the job ended.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from medarc_rl.cli import warn
from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.external import Answer, NoAnswer, ask
from medarc_rl.jobs import JobRecord, State, Status, log_lines
from prime_rl.run.paths import RunPaths
from prime_rl.watch.progress import printable

SLURM_LIMIT_S = 20.0
"""Time limit of one Slurm command, in seconds. Some wait for minutes if the controller is down."""
LOG, CLUSTER = "log", "cluster"
"""Keys of a record's details: the log file, and the cluster of a job that was not submitted to this machine's own."""
_STATES: Mapping[State, tuple[str, ...]] = {
    "queued": ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
    "running": ("RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"),
    "succeeded": ("COMPLETED",),
    "cancelled": ("CANCELLED",),
    "failed": (
        *("BOOT_FAIL", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("RECONFIG_FAIL", "REVOKED", "TIMEOUT"),
    ),
}
_BY_NAME: Mapping[str, State] = {name: state for state, names in _STATES.items() for name in names}
_BY_RESULT: Mapping[str, State] = {
    "complete": "succeeded",
    "failed": "failed",
    "refused": "failed",
    "stopped": "cancelled",
}
"""States by the result of a run's last attempt."""
_WORDS = {
    "BOOT_FAIL": "the node did not boot",
    "DEADLINE": "the deadline passed before it could end",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "out of memory",
    "PREEMPTED": "preempted",
    "REQUEUE_HOLD": "requeued and held: `scontrol release` lets it start",
    "REVOKED": "another cluster took it",
    "SPECIAL_EXIT": "held after a special exit: `scontrol release` lets it start",
    "SUSPENDED": "suspended",
    "STOPPED": "stopped",
    "TIMEOUT": "the time limit was reached",
}
_NOTHING = ("", "None", "(null)", "Unknown", "N/A", "0:0")


class SlurmQueue:
    """Implements `Tracker`."""

    def status(self, record: JobRecord) -> Status:
        cluster = record.details.get(CLUSTER)
        try:
            found = shown_job(record.id, cluster)
        except NoAnswer as error:
            raise MedarcError(f"Slurm does not answer: {printable(str(error))}") from error
        status = status_of(found) if found is not None else accounted(record.id, cluster)
        if status is None:
            return _status_of_run(Path(record.output), record.id)
        return resumable(Path(record.output), record.id) or status if status.state == "failed" else status

    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        return log_lines(Path(record.details.get(LOG) or ""), follow, lambda: self.status(record))

    def cancel(self, record: JobRecord) -> None:
        try:
            answer = ask(["scancel", *_on(record.details.get(CLUSTER)), record.id], SLURM_LIMIT_S)
        except NoAnswer as error:
            raise MedarcError(f"job {record.id} was not cancelled: {error}") from error
        if answer.code != 0:
            raise MedarcError(f"job {record.id} was not cancelled: {printable(answer.last_line)}")


def _on(cluster: str | None) -> list[str]:
    """Options of a Slurm command that asks about a job of another cluster, whose numbers are others."""
    return [f"--clusters={cluster}"] if cluster else []


def resumable(directory: Path, job_id: str) -> Status | None:
    """The end of a job that saved and stopped, as before its time limit. None if it did not, or nothing is saved.

    For Slurm it has failed, because its launcher ended with the exit code of a signal.
    """
    from prime_rl.history.attempts import read_attempts
    from prime_rl.run.checkpoints import SavedSteps

    paths = RunPaths(directory)
    attempts = [each for each in read_attempts(paths) if each.slurm_job == job_id]
    saved = SavedSteps.of(paths).complete
    if not attempts or attempts[-1].result != "stopped" or not saved:
        return None
    return Status(
        "stopped", f"{attempts[-1].message}; submit it again with --resume latest: step {max(saved)} is saved"
    )


def status_of(job: Properties) -> Status:
    """The state of a job that the controller shows."""
    name = job.get("JobState", "").split()[0] if job.get("JobState") else ""
    state = _BY_NAME.get(name, "unknown")
    details = [_WORDS.get(name, "")]
    reason = job.get("Reason", "")
    if state == "queued" and reason not in _NOTHING:
        details.append(f"waits: {reason}")
    if state == "running" and job.get("NodeList", "") not in _NOTHING:
        details.append(f"on {job['NodeList']}, ends by {job.get('EndTime', 'an unknown time')}")
    if state == "failed":
        details.append(_exit_words(job.get("ExitCode", "")))
        if name == "TIMEOUT" and job.get("TimeLimit"):
            details.append(f"TimeLimit={job['TimeLimit']}")
    restarts = job.get("Restarts", "0")
    if restarts not in ("0", ""):
        details.append(f"requeued {restarts} times" if restarts != "1" else "requeued once")
    if state == "unknown":
        details.append(name)
    return Status(state, "; ".join(filter(None, details)))


def _exit_words(code: str) -> str:
    """Slurm writes `CODE:SIGNAL`."""
    if code in _NOTHING:
        return ""
    exit_code, _, signal = code.partition(":")
    return f"exit code {exit_code}" if signal in ("", "0") else f"signal {signal}"


def accounted(job_id: str, cluster: str | None = None) -> Status | None:
    """The state of a job in the accounting database. None if there is no database, or if it does not know the job.

    A requeued job has one row for each attempt; the last one counts.
    """
    words = ["sacct", *_on(cluster), "--jobs", job_id, "--allocations", "--duplicates", "--noheader", "--parsable2"]
    try:
        answer = ask([*words, "--format=JobID,State,ExitCode,Timelimit,NodeList,End"], SLURM_LIMIT_S)
    except NoAnswer:
        return None
    rows = [line.split("|") for line in answer.stdout.splitlines() if line.count("|") == 5]
    rows = [row for row in rows if row[0] == job_id]
    if answer.code != 0 or not rows:
        return None
    _, state, exit_code, time_limit, nodes, end = rows[-1]
    names = {"JobState": state, "ExitCode": exit_code, "TimeLimit": time_limit, "NodeList": nodes, "EndTime": end}
    return status_of({**names, "Restarts": str(len(rows) - 1)})


def _status_of_run(directory: Path, job_id: str) -> Status:
    """The end of the job's last attempt at a run, from the run's directory."""
    from prime_rl.history.attempts import read_attempts

    forgotten = "Slurm does not know the job any more"
    attempts = [each for each in read_attempts(RunPaths(directory)) if str(each.slurm_job) == job_id]
    state = _BY_RESULT.get(str(attempts[-1].result)) if attempts else None
    if state is None:
        return Status("unknown", forgotten)
    return Status(state, f"{forgotten}; its run: {attempts[-1].result} {attempts[-1].message}".strip())


# Jobs that will read a run's config.


def refuse_if_queued(paths: RunPaths, submits: bool, env: Mapping[str, str] = os.environ) -> None:
    """Refuse to overwrite the config that a job reads when it starts, or starts again. A chain's jobs have their own.

    Raises:
        UsageError: such a job waits or runs. This process's own job does not count.
    """
    scripts = [script for command in ("sft", "dpo", "rm", "rl") if (script := paths.batch_script(command)).exists()]
    if not scripts or shutil.which("squeue") is None:
        return
    try:
        jobs = queued_jobs()
    except NoAnswer as error:
        warn(f"whether a job of {paths.root} still waits in the queue is not known: {printable(str(error))}")
        return
    readers = [
        job
        for job in jobs
        if job.state != "COMPLETING"
        and job.id != env.get("SLURM_JOB_ID")
        and any(_is_same_file(job.script, script) for script in scripts)
    ]
    if not readers:
        return
    ids = [job.id for job in readers]
    shown = ", ".join(f"job {job.id} of {job.user} ({job.state.lower()})" for job in readers)
    chain = f"continue after it with --dependency afterany:{':'.join(ids)} --resume auto, " if submits else ""
    raise UsageError(
        f"{paths.root} belongs to {shown}, which reads its config there when it starts: "
        f"cancel it with `scancel {' '.join(ids)}`, {chain}or choose another --output-dir"
    )


def _is_same_file(job_script: Path, script: Path) -> bool:
    # Only paths with that name: others may be on file systems that do not answer.
    try:
        return job_script.name == script.name and job_script.samefile(script)
    except OSError:
        return False


# Slurm's controller.


Properties = Mapping[str, str]
"""`Name=value` pairs as scontrol prints them for one thing."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that has not ended."""

    id: str
    state: str
    """Slurm's name of the state, as PENDING."""
    user: str
    script: Path
    """The script's path when it was submitted. The job itself has a copy."""


def shown(kind: str, *names: str, limit_s: float = SLURM_LIMIT_S) -> list[Properties]:
    """The output of `scontrol show`: a job, or every partition or node. Empty if there is none.

    Raises:
        NoAnswer: there is no scontrol, or it did not answer in time.
    """
    answer = ask(["scontrol", "--oneliner", "show", kind, *names], limit_s)
    return [_properties(line) for line in answer.stdout.splitlines() if "=" in line]


def shown_job(job_id: str, cluster: str | None = None) -> Properties | None:
    """The controller's description of a job. None if it does not know the job (any more).

    Raises:
        NoAnswer: there is no scontrol, or the controller did not answer.
    """
    answer = ask(["scontrol", *_on(cluster), "--oneliner", "show", "job", job_id], SLURM_LIMIT_S)
    found = next((_properties(line) for line in answer.stdout.splitlines() if "=" in line), None)
    if found is None and "invalid job id" not in (answer.stderr + answer.stdout).lower():
        raise NoAnswer(answer.last_line)
    return found


def queued_jobs() -> list[QueuedJob]:
    """Jobs of all users that wait or run.

    Raises:
        NoAnswer: there is no squeue, or the controller did not answer.
    """
    answer = ask(["squeue", "--noheader", "--format=%i|%T|%u|%o"], SLURM_LIMIT_S)
    if answer.code != 0:
        raise NoAnswer(f"squeue: {answer.last_line}")
    # A path with a line break tears its line apart; such a script is not found.
    rows = [row for line in answer.stdout.splitlines() if len(row := line.split("|", 3)) == 4]
    return [QueuedJob(job_id, state, user, Path(script)) for job_id, state, user, script in rows]


def _properties(line: str) -> Properties:
    found: dict[str, str] = {}
    for word in line.split():
        name, equals, value = word.partition("=")
        # The first one counts: comments at the end of the line hold what people wrote.
        if equals:
            found.setdefault(name, value)
    return found


def requeue(job_id: str, limit_s: float) -> Answer:
    """Make Slurm end a job that runs, and start it again later. Raises NoAnswer."""
    return ask(["scontrol", "requeue", job_id], limit_s)
