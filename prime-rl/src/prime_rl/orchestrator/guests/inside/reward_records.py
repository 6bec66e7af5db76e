"""Keeps what reward functions raise. verifiers counts such a call as 0 and only logs it."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .frames import finite

KEY = "reward_errors"
"""Key of a rollout's state: a list of `{"function", "traceback"}`."""
MAX_TRACEBACK_CHARS = 4000
_NAMES = ("funcs", "reward_funcs")
"""Where rubrics keep their functions; the second until verifiers 0.1.8."""


def leaves(rubric: Any) -> Iterator[Any]:
    """A rubric and all of its members."""
    if rubric is None:
        return
    yield rubric
    members = [*getattr(rubric, "rubrics", []), *(env.rubric for env in getattr(rubric, "env_map", {}).values())]
    for member in members:
        yield from leaves(member)


def record_reward_errors(rubric: Any) -> None:
    """Let each function of a rubric write down in the rollout's state what it raises, and raise it again."""
    for name in _NAMES:
        functions = getattr(rubric, name, None)
        if isinstance(functions, list):
            setattr(rubric, name, [_recording(each) for each in functions])


def _recording(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
    scores_group = {"states", "completions", "prompts"} & set(signature.parameters)
    key = "states" if scores_group else "state"
    wants_key = takes_all or key in signature.parameters

    @functools.wraps(function)
    async def recording(*args: Any, **kwargs: Any) -> Any:
        found = kwargs.get(key) if wants_key else kwargs.pop(key, None)
        states = [] if found is None else found if scores_group else [found]
        try:
            value = function(*args, **kwargs)
            return checked(await value if inspect.isawaitable(value) else value, bool(scores_group))
        except (Exception, SystemExit) as error:
            for state in states:
                entry = {"function": getattr(function, "__name__", repr(function)), "traceback": shown(error, __file__)}
                state.setdefault(KEY, []).append(entry)
            if isinstance(error, SystemExit):
                raise RuntimeError(f"the reward function called sys.exit({error.code!r})") from error
            raise

    if not wants_key:
        own = inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY)
        recording.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), own]
        )
    return recording


def checked(value: Any, is_several: bool) -> Any:
    """The value. Raises ValueError if it is no finite number, or with `is_several` a collection of them."""
    values = list(value) if is_several and isinstance(value, Iterable) else [value]
    if any(finite(each) is None for each in values):
        raise ValueError(f"it returned {str(value)[:100]} instead of a finite number")
    return value


def shown(error: BaseException, caller: str) -> str:
    """The end of the traceback, from the function on that the module in the file `caller` has called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == caller:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()[-MAX_TRACEBACK_CHARS:]
