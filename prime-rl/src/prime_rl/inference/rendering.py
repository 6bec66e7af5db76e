"""Bounds the time to render and tokenize a request, in both engines: a model's own chat template may loop.

vLLM itself gives up after 30 s, with status 500, but its thread goes on as long as the template loops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

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
            f"Rendering and tokenizing the messages takes more than {limit_s:g} s: check the chat template for a loop",
            param="messages",
        ) from None


LIMIT_S = 25.0
"""Less than vLLM's own limit."""
_SHORT = [{"role": "user", "content": "hello"}]


def bound_rendering(tokenizer: Any, limit_s: float = LIMIT_S) -> str | None:
    """Make the tokenizer give up on a conversation after `limit_s`, with a ValueError, which vLLM answers with 400.

    Returns:
        Why the template is of no use, if it loops for a short message already.
    """
    render: Callable[..., Any] = tokenizer.apply_chat_template

    @functools.wraps(render)
    def bounded(*args: Any, **options: Any) -> Any:
        try:
            return in_time(lambda: render(*args, **options), limit_s)
        except RequestError as error:
            raise ValueError(str(error)) from None

    tokenizer.apply_chat_template = bounded
    try:
        in_time(lambda: _rendered(render), limit_s)
    except RequestError as error:
        return f"the chat template of {tokenizer.name_or_path}, with one short message: {error}"
    return None


def _rendered(render: Callable[..., Any]) -> Any:
    try:
        return render(_SHORT, tokenize=False, add_generation_prompt=True)
    except Exception:  # noqa: BLE001 - a template may refuse this message and take others, or be missing
        return None
