"""Ids of the built-in environments, with their modules and the packages that they need."""

from __future__ import annotations

import importlib.util
from pathlib import Path

BUILT_IN = {
    "gymnasium": "prime_rl.environments.adapters.gymnasium",
    "openenv": "prime_rl.environments.adapters.openenv",
    "reasoning-gym": "prime_rl.environments.adapters.reasoning_gym",
    "rows": "prime_rl.environments.rows.single_turn",
    "rubric": "prime_rl.environments.judging.rubric",
    "textarena": "prime_rl.environments.adapters.textarena",
}
"""The module of each id."""
PACKAGES = {
    "prime_rl.environments.adapters.gymnasium": "gymnasium",
    "prime_rl.environments.adapters.reasoning_gym": "reasoning_gym",
    "prime_rl.environments.adapters.textarena": "textarena",
}
"""The package that a module needs, besides the engine's own dependencies."""


def built_in_module(env_id: str) -> str | None:
    """The module of a built-in environment; None for other ids. An id may end in `@version`.

    An installed package of the same name that has `load_environment` takes precedence.
    """
    name = env_id.partition("@")[0]
    module = BUILT_IN.get(name)
    return None if module is None or _is_installed(name.replace("-", "_")) else module


def _is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    origin = None if spec is None else spec.origin
    return origin is not None and Path(origin).is_file() and b"load_environment" in Path(origin).read_bytes()


def missing_package(module: str) -> str | None:
    """How to install the package that a module needs, in one line. None if nothing is missing."""
    package = PACKAGES.get(module)
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return f"no package {package.replace('_', '-')!r}: install it with `uv sync --inexact --extra environments`"
