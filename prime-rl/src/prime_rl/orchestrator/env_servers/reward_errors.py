"""Keeps what reward functions raise. verifiers counts a call that fails as 0 and only logs it."""

from __future__ import annotations

import functools
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import verifiers as vf

from prime_rl.orchestrator.env_servers.overlong import got_no_answer
from prime_rl.orchestrator.env_servers.rubrics import leaves
from prime_rl.orchestrator.rollouts.rollout import REWARD_ERRORS

MAX_TRACEBACK_LINES = 15
MAX_TRACEBACK_CHARS = 4000


class RewardFailure(Exception):
    """A reward function called `sys.exit`, or returned no finite number."""


def record_reward_errors(rubric: vf.Rubric | None) -> None:
    """Let each reward function of a rubric write down in the rollout's state what it raises.

    The exception then goes on to verifiers, which counts the call as 0. A rollout whose prompt was too long has no
    answer, and is not scored.
    """
    for part in leaves(rubric):
        part.funcs = [_recording(function, part._is_group_func(function)) for function in part.funcs]


def _recording(function: Callable[..., Any], scores_group: bool) -> Callable[..., Any]:
    """The same function, which also asks verifiers for the rollout's `state`, or a group's `states`."""
    signature, key = inspect.signature(function), "states" if scores_group else "state"
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
    wants_key = takes_all or key in signature.parameters

    name = getattr(function, "__name__", repr(function))

    # Not a coroutine function, because a rubric of the environment's own may call it as it is.
    @functools.wraps(function)
    def recording(*args: Any, **kwargs: Any) -> Any:
        found = kwargs.get(key) if wants_key else kwargs.pop(key, None)
        states = [] if found is None else found if scores_group else [found]
        count = len(states) if scores_group else None
        if states and all(map(got_no_answer, states)):
            return 0.0 if count is None else [0.0] * count
        with _recorded(name, states):
            value = function(*args, **kwargs)
            return _awaited(value, name, states, count) if inspect.isawaitable(value) else _checked(value, count)

    if not wants_key:
        own = inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY)
        recording.__signature__ = signature.replace(parameters=[*signature.parameters.values(), own])  # type: ignore[attr-defined]
    return recording


async def _awaited(value: Awaitable[Any], name: str, states: Sequence[vf.State], count: int | None) -> Any:
    with _recorded(name, states):
        return _checked(await value, count)


@contextmanager
def _recorded(name: str, states: Sequence[vf.State]) -> Iterator[None]:
    """Write an exception of the block into the states, and let it pass. SystemExit becomes RewardFailure."""
    try:
        yield
    except (Exception, SystemExit) as error:
        for state in states:
            state.setdefault(REWARD_ERRORS, []).append({"function": name, "traceback": _shown(error)})
        if isinstance(error, SystemExit):
            raise RewardFailure(f"it called sys.exit({error.code!r})") from error
        raise


def _checked(value: Any, count: int | None) -> Any:
    """The value. Raises RewardFailure if it is no finite number, or for a group no sequence of `count` of them."""
    wanted = "a number" if count is None else f"{count} numbers"
    try:
        numbers = [float(each) for each in ([value] if count is None else [value[index] for index in range(count)])]
    except (TypeError, ValueError, LookupError, OverflowError):
        raise RewardFailure(f"it returned {str(value)[:100]} instead of {wanted}") from None
    if not all(map(math.isfinite, numbers)):
        # Even with the weight 0 it would make the whole reward NaN.
        raise RewardFailure(f"it returned {str(value)[:100]} instead of a finite number")
    return value


def _shown(error: BaseException) -> str:
    """The end of the traceback, from the function on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace)).splitlines()
    return "\n".join(lines[-MAX_TRACEBACK_LINES:])[-MAX_TRACEBACK_CHARS:]
