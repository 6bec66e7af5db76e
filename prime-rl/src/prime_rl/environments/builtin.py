"""Short ids of the environments that come with the engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

BUILT_IN = {
    "gymnasium": "prime_rl.environments.adapters.gymnasium",
    "openenv": "prime_rl.environments.adapters.openenv",
    "reasoning-gym": "prime_rl.environments.adapters.reasoning_gym",
    "rows": "prime_rl.environments.rows.single_turn",
    "rubric": "prime_rl.environments.judging.rubric_environment",
    "textarena": "prime_rl.environments.adapters.textarena",
}
"""The module of each id."""


def built_in_module(env_id: str) -> str | None:
    """The module of a built-in environment; None for any other id. An id may end in `@version`.

    An installed package of the same name that has `load_environment` goes first.
    """
    name = env_id.partition("@")[0]
    module = BUILT_IN.get(name)
    return None if module is None or _is_installed(name.replace("-", "_")) else module


def _is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    origin = None if spec is None else spec.origin
    return origin is not None and Path(origin).is_file() and b"load_environment" in Path(origin).read_bytes()
