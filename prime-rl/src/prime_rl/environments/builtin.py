"""Short ids of the environments that come with the engine."""

from __future__ import annotations

BUILT_IN = {
    "rows": "prime_rl.environments.rows.environment",
}
"""The module of each id. An installed package of the same name goes first if it has `load_environment`."""


def built_in_module(env_id: str) -> str | None:
    """The module of a built-in environment; None for any other id. An id may end in `@version`."""
    return BUILT_IN.get(env_id.partition("@")[0].replace("_", "-"))
