"""What can go wrong with a judge."""

from __future__ import annotations


class JudgeLost(Exception):
    """A judge cannot be used any more: the run ends with this message."""


class CallFailed(Exception):
    """One call has no answer, after its retries."""


class CallRefused(Exception):
    """The judge's server refuses the request itself, such as one with too long a prompt."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
