"""Checks before a batch job is submitted: of the cluster, the file system, the hub and the job's software.

Each check yields rows of the table that `medarc_slurm check` prints; `checks/job.py` lists them all in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    OK = "ok"
    FAILED = "FAILED"
    UNKNOWN = "not checked"
    """It cannot be checked from here. It does not stop a submission."""


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that the job needs, and whether it is there."""

    what: str
    state: State
    detail: str
    """The finding; for a failure, also what to do."""


def ok(what: str, detail: str) -> Row:
    return Row(what, State.OK, detail)


def failed(what: str, detail: str) -> Row:
    return Row(what, State.FAILED, detail)


def unknown(what: str, detail: str) -> Row:
    return Row(what, State.UNKNOWN, detail)


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as aligned lines of text."""
    names = max((len(row.what) for row in rows), default=0)
    states = max((len(row.state) for row in rows), default=0)
    return [f"{row.what:<{names}}  {row.state:<{states}}  {' '.join(row.detail.split())}" for row in rows]


def as_table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The rows for programs."""
    return [{"what": row.what, "state": row.state.value.lower(), "detail": row.detail} for row in rows]
