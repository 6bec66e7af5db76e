"""Asks Slurm's controller what it knows, and to requeue a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from medarc_rl.external import Answer, NoAnswer, ask

SLURM_LIMIT_S = 20.0
"""Time limit of one Slurm command, in seconds. Some wait for minutes if the controller is down."""

Properties = Mapping[str, str]
"""`Name=value` pairs as scontrol prints them for one thing."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that has not ended."""

    id: str
    state: str
    """In Slurm's words, as PENDING."""
    user: str
    script: Path
    """The script's path when it was submitted. The job itself has a copy."""


def shown(kind: str, *names: str, limit_s: float = SLURM_LIMIT_S) -> list[Properties]:
    """What `scontrol show` prints: a job, or every partition or node. Empty if there is none.

    Raises:
        NoAnswer: there is no scontrol, or it did not answer in time.
    """
    answer = ask(["scontrol", "--oneliner", "show", kind, *names], limit_s)
    return [_properties(line) for line in answer.stdout.splitlines() if "=" in line]


def shown_job(job_id: str) -> Properties | None:
    """What the controller knows of a job; None if it does not know it, or not any more.

    Raises:
        NoAnswer: there is no scontrol, or the controller did not answer.
    """
    answer = ask(["scontrol", "--oneliner", "show", "job", job_id], SLURM_LIMIT_S)
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
