"""Keeps what the server says of a prompt that is too long. verifiers drops it, and scores the rollout."""

from __future__ import annotations

import functools
import re
from typing import Any

import verifiers as vf
from verifiers.errors import OverlongPromptError

from prime_rl.orchestrator.guests.inside.reward_records import OVERLONG_PROMPT

_COUNTS = re.compile(
    r"context length is (\d+) tokens.*?(?:prompt has|contains(?: at least)?) (\d+) (?:input )?tokens", re.DOTALL
)
"""How our engine and vLLM say it."""


def record_overlong_prompts(env: vf.Environment) -> None:
    """Write into a rollout's state, or that of any member of a group, why its prompt was refused."""
    hook = env.get_model_response

    @functools.wraps(hook)
    async def recording(state: vf.State, *args: Any, **kwargs: Any) -> Any:
        try:
            return await hook(state, *args, **kwargs)
        except OverlongPromptError as error:
            state[OVERLONG_PROMPT] = described(str(error))
            raise

    env.get_model_response = recording
    for member in getattr(env, "env_map", {}).values():
        record_overlong_prompts(member)


def described(message: str) -> str:
    """What the server said, in few words if it has a known form."""
    if (found := _COUNTS.search(message)) is None:
        return f"prompt too long: {' '.join(message.split())}"
    return f"prompt too long ({found[2]} tokens, limit {found[1]})"
