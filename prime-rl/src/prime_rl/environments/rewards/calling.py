"""Loads a reward function, and matches arguments to its signature: AReaL's, verifiers', or a mixture."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from prime_rl.environments.rewards.registry import RewardFault

AREAL = ("prompt", "completions", "prompt_ids", "completion_ids")
"""AReaL's four positional arguments, in order. Every column of the row follows as a keyword."""
HERE_ONLY = ("parser", "client", "judge")
"""Arguments that cannot be sent to a worker. A function that takes one runs in the caller's process."""


def load(path: str, warm: bool = False) -> Callable[..., Any]:
    """Import the function at `module:function`. `warm` also calls `warm_up()` of its module, if it has one.

    Raises:
        RewardFault: it does not import, or is not a function.
    """
    module_name, _, name = path.rpartition(":")
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, name)
        if warm and hasattr(module, "warm_up"):
            module.warm_up()
    except AttributeError:
        raise RewardFault(f"module {module_name!r} has no {name!r}") from None
    except (Exception, SystemExit) as error:
        raise RewardFault(f"{module_name!r} does not import: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise RewardFault(f"{path!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def describe(function: Callable[..., Any]) -> dict[str, Any]:
    """Describe a function to the pool: whether it is async, and the names of its parameters.

    Raises:
        RewardFault: its signature cannot be read.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardFault(f"its signature cannot be read: {error}") from error
    call = getattr(function, "__call__", None)  # noqa: B004 - an object's own `async def __call__`
    return {
        "is_async": inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call),
        "parameters": list(parameters),
    }


def arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Choose the positional and keyword arguments of one call.

    `given` has verifiers' arguments (`prompt`, `completion`, `answer`, `info`, `state`, `task`), AReaL's
    (`prompt_text`, `completion_text`, `prompt_ids`, `completion_ids`), the columns (`row`) and the spec's `args`.

    Raises:
        RewardFault: a parameter without a default has no value.
    """
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    row, own = dict(given.get("row") or {}), dict(given.get("args") or {})
    if "completions" in names:  # AReaL's signature: text and ids, whatever the four are called
        first = [each for each in names if parameters[each].kind is not inspect.Parameter.VAR_KEYWORD][:4]
        known = {"prompt": given["prompt_text"], "completions": given["completion_text"]}
        known |= {"prompt_ids": given["prompt_ids"], "completion_ids": given["completion_ids"]}
        row = {name: value for name, value in row.items() if name not in AREAL}
        known = {name: value for name, value in known.items() if takes_all or name in first}
    else:
        known = {name: given[name] for name in _VERIFIERS if name in given}
    if not takes_all or "completions" in names:
        values = {**row, **known, **own}
    else:
        values = {**known, **{name: value for name, value in row.items() if name not in known}, **own}
    if not takes_all:
        values = {name: value for name, value in values.items() if name in names}
    missing = [
        name
        for name, each in parameters.items()
        if each.default is each.empty
        and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        and name not in values
    ]
    if missing:
        columns = ", ".join(map(repr, sorted(row))) or "no columns"
        raise RewardFault(f"it needs {', '.join(map(repr, missing))}, and the row has {columns}")
    positional = [values.pop(name) for name, each in parameters.items() if each.kind is each.POSITIONAL_ONLY]
    return positional, values


_VERIFIERS = (
    "prompt", "completion", "answer", "info", "state", "task",
    "prompt_text", "completion_text", "prompt_ids", "completion_ids",
)  # fmt: skip


def checked(value: Any) -> float:
    """Return the value of a reward function as a number.

    Raises:
        RewardFault: the value is not a number, or not finite.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RewardFault(f"it returned {str(value)[:100]!r} ({type(value).__name__}) instead of a number") from None
    if not math.isfinite(number):
        raise RewardFault(f"it returned {number}")
    return number
