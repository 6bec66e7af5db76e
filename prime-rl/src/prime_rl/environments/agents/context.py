"""What an agent may ask about the attempt that it makes."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a row."""

    task_id: str
    """The number of the row, or its `id`."""
    is_eval: bool


_CURRENT: ContextVar[Attempt | None] = ContextVar("attempt", default=None)


def get() -> Attempt:
    """The attempt of the running agent.

    Raises:
        LookupError: no agent is running.
    """
    attempt = _CURRENT.get()
    if attempt is None:
        raise LookupError("no agent is running here")
    return attempt


def enter(attempt: Attempt) -> None:
    """From now on, `get` answers with this attempt, in this task and those that it starts."""
    _CURRENT.set(attempt)
