"""Keeps what reward functions raise, whatever verifiers is installed: it counts such a call as 0 and only logs it."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .frames import finite

KEY = "reward_errors"
"""Key of a rollout's state: a list of `{"function", "traceback"}`, one for each reward function that failed."""
OVERLONG_PROMPT = "overlong_prompt"
"""Key of a rollout's state: why the server refused a prompt as too long."""
MAX_TRACEBACK_LINES = 15
MAX_TRACEBACK_CHARS = 4000
NAMES = ("funcs", "reward_funcs")
"""Where rubrics keep their functions; the second until verifiers 0.1.8."""


class RewardFailure(ValueError):
    """A reward function called `sys.exit`, or returned no finite number."""


def leaves(rubric: Any) -> Iterator[Any]:
    """A rubric and all of its members."""
    if rubric is None:
        return
    yield rubric
    members = [*getattr(rubric, "rubrics", []), *(env.rubric for env in getattr(rubric, "env_map", {}).values())]
    for member in members:
        yield from leaves(member)


def functions_with_weights(rubric: Any) -> Iterator[tuple[str, float]]:
    """Name and weight of a rubric's own functions. What verifiers itself measures, such as the number of turns, is left
    out."""
    functions = getattr(rubric, "funcs", None) or getattr(rubric, "reward_funcs", None) or []
    weights = getattr(rubric, "weights", None) or getattr(rubric, "reward_weights", None) or []
    for function, weight in zip(functions, weights):  # noqa: B905 - Python 3.9 has no strict
        if weight or not str(getattr(function, "__module__", "")).startswith("verifiers."):
            yield getattr(function, "__name__", repr(function)), float(weight)


def reward_functions(rubric: Any) -> dict[str, float]:
    """Weight of each reward function in the sum that is the reward, by name; 0 for one that is only measured."""
    return dict(pair for part in leaves(rubric) for pair in functions_with_weights(part))


def got_no_answer(state: Mapping[str, Any]) -> bool:
    """Whether the first prompt was too long. Such a rollout has nothing that could be scored."""
    return OVERLONG_PROMPT in state and not state.get("trajectory")


def record_reward_errors(rubric: Any) -> None:
    """Let each function of a rubric and its members write down in the rollout's state what it raises.

    The exception then goes on to verifiers, which counts the call as 0.
    """
    for part in leaves(rubric):
        for name in NAMES:
            functions = getattr(part, name, None)
            if isinstance(functions, list):
                setattr(part, name, [_recording(each, _scores_group(part, each)) for each in functions])


def _scores_group(rubric: Any, function: Callable[..., Any]) -> bool:
    decides = getattr(rubric, "_is_group_func", None)
    if decides is not None:
        return bool(decides(function))
    return bool({"states", "completions", "prompts"} & set(inspect.signature(function).parameters))


def _recording(function: Callable[..., Any], scores_group: bool) -> Callable[..., Any]:
    """The same function, which also asks verifiers for the rollout's `state`, or a group's `states`."""
    signature, key = inspect.signature(function), "states" if scores_group else "state"
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
    wants_key = takes_all or key in signature.parameters
    name = getattr(function, "__name__", repr(function))

    def prepared(kwargs: dict[str, Any]) -> tuple[list[Any], int | None, Any]:
        """The states, how many numbers are wanted, and the value if there is nothing to score."""
        found = kwargs.get(key) if wants_key else kwargs.pop(key, None)
        states = [] if found is None else list(found) if scores_group else [found]
        count = len(states) if scores_group and states else None
        unscored = bool(states) and all(map(got_no_answer, states))
        return states, count, (0.0 if count is None else [0.0] * count) if unscored else None

    async def awaited(value: Any, states: list[Any], count: int | None) -> Any:
        with _recorded(name, states):
            return checked(await value, scores_group, count)

    # A plain function stays one: a rubric of the environment's own may call it as it is.
    @functools.wraps(function)
    def recording(*args: Any, **kwargs: Any) -> Any:
        states, count, unscored = prepared(kwargs)
        if unscored is not None:
            return unscored
        with _recorded(name, states):
            value = function(*args, **kwargs)
            if inspect.isawaitable(value):
                return awaited(value, states, count)
            return checked(value, scores_group, count)

    @functools.wraps(function)
    async def recording_later(*args: Any, **kwargs: Any) -> Any:
        states, count, unscored = prepared(kwargs)
        if unscored is not None:
            return unscored
        return await awaited(function(*args, **kwargs), states, count)

    wrapped: Callable[..., Any] = recording_later if inspect.iscoroutinefunction(function) else recording
    if not wants_key:
        own = inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY)
        taken = signature.replace(parameters=[*signature.parameters.values(), own])
        wrapped.__signature__ = taken  # type: ignore[attr-defined]
    return wrapped


@contextmanager
def _recorded(name: str, states: list[Any]) -> Iterator[None]:
    """Write an exception of the block into the states, and let it pass. SystemExit becomes RewardFailure."""
    try:
        yield
    except (Exception, SystemExit) as error:
        for state in states:
            state.setdefault(KEY, []).append({"function": name, "traceback": shown(error, __file__)})
        if isinstance(error, SystemExit):
            raise RewardFailure(f"it called sys.exit({error.code!r})") from error
        raise


def checked(value: Any, is_several: bool, count: int | None = None) -> Any:
    """The value. Raises RewardFailure if it is no finite number, or with `is_several` a sequence of them: `count`, if
    that is known.

    Even with the weight 0, a NaN would make the whole reward NaN.
    """
    wanted = "a finite number" if not is_several else "numbers" if count is None else f"{count} numbers"
    try:
        values = [value] if not is_several else [value[at] for at in range(len(value) if count is None else count)]
        [float(each) for each in values]
    except (TypeError, ValueError, LookupError, OverflowError):
        raise RewardFailure(f"it returned {str(value)[:100]} instead of {wanted}") from None
    if any(finite(each) is None for each in values):
        raise RewardFailure(f"it returned {str(value)[:100]} instead of a finite number")
    return value


def shown(error: BaseException, caller: str) -> str:
    """The end of the traceback, from the function on that the module in the file `caller` has called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == caller:
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace)).splitlines()
    return "\n".join(lines[-MAX_TRACEBACK_LINES:])[-MAX_TRACEBACK_CHARS:]
