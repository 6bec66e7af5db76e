"""Bounds the time that vLLM takes to render a conversation.

vLLM itself gives up after 30 s, with status 500, but its thread goes on as long as the template loops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from prime_rl.inference.preparation import in_time
from prime_rl.inference.protocol import RequestError

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
