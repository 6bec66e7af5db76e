"""Bounds the time to render and tokenize a request: a model's own chat template may loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from prime_rl.checks.time_limit import MAX_RENDER_S, OutOfTime, time_limit
from prime_rl.inference.protocol import RequestError

Result = TypeVar("Result")


def in_time(work: Callable[[], Result], limit_s: float = MAX_RENDER_S) -> Result:
    """The result of `work`, which prepares a request.

    Raises:
        RequestError: it takes longer than `limit_s`.
    """
    try:
        with time_limit(limit_s):
            return work()
    except OutOfTime:
        raise RequestError(
            f"Rendering and tokenizing the messages takes more than {limit_s:g} s: look for a loop in the chat "
            "template",
            param="messages",
        ) from None
