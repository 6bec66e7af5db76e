"""Asks Slurm's controller what it knows, and to requeue a job."""

from __future__ import annotations

from collections.abc import Mapping

from medarc_rl.external import Answer, NoAnswer, ask

SLURM_LIMIT_S = 20.0
"""Time limit of one Slurm command, in seconds. Some wait for minutes if the controller is down."""

Properties = Mapping[str, str]
"""`Name=value` pairs as scontrol prints them for one thing."""


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
