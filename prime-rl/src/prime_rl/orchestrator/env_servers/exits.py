"""Keeps `sys.exit` in an environment's code from ending the process that runs it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any

import verifiers as vf

HOOKS = ("setup_state", "env_response", "is_completed", "rollout")
"""Methods of an environment that run its author's code. verifiers may run each of the first three in a task of its own,
and an event loop ends at once if a task raises SystemExit."""


class CalledExit(vf.Error):  # type: ignore[misc]
    """The code of an environment called `sys.exit`. Ends the rollout."""


def contain_exits(env: vf.Environment) -> None:
    """Turn SystemExit in the rollouts of an environment, or of any member of a group, into an error of the rollout."""
    for name in HOOKS:
        if (hook := getattr(env, name, None)) is not None:
            setattr(env, name, _contained(hook))
    for member in getattr(env, "env_map", {}).values():
        contain_exits(member)


def _contained(hook: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(hook)
    async def contained(*args: Any, **kwargs: Any) -> Any:
        try:
            return await hook(*args, **kwargs)
        except SystemExit as exit_:
            raise CalledExit(f"the environment called sys.exit({exit_.code!r})") from exit_

    return contained
