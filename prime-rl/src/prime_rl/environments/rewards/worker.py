"""Worker process that calls reward functions: `python -m prime_rl.environments.rewards.worker`, started by the pool.

It reads requests from its standard input and writes replies to its standard output. Output of functions is discarded.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from prime_rl.environments.rewards.registry import RewardFault
from prime_rl.environments.rewards.wire import Ended, encode, receive, send
from prime_rl.utils.errors import one_line

AREAL = ("prompt", "completions", "prompt_ids", "completion_ids")
"""AReaL's four positional arguments, in order. Every column of the row follows as a keyword."""
HERE_ONLY = ("parser", "client", "judge")
"""Arguments that cannot be sent to a worker. A function that takes one runs in the caller's process."""
_VERIFIERS = (
    "prompt", "completion", "answer", "info", "state", "task",
    "prompt_text", "completion_text", "prompt_ids", "completion_ids",
)  # fmt: skip
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""
MAX_ERROR_CHARS, MAX_TRACEBACK_CHARS = 500, 4000


def main() -> None:
    if sys.platform == "linux":  # ends with the pool even while a function holds the interpreter lock
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    for descriptor in (requests, replies):
        os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends its workers
    while True:
        try:
            send(replies, encode(_reply(receive(requests))))
        except Ended:
            os._exit(0)


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    try:
        _extend_sys_path(request.get("sys_path", []))
        function = load(request["fn"], warm=request["do"] != "call")
        if request["do"] == "import":
            return {"value": 0.0}
        if request["do"] == "describe":
            note = getattr(sys.modules[request["fn"].rpartition(":")[0]], "note", None)
            return {"described": {**describe(function), "note": note(request["args"]) if note is not None else ""}}
        positional, keywords = arguments(function, request["given"])
        value = function(*positional, **keywords)
        return {"value": [checked(each) for each in value] if request.get("many") else checked(value)}
    except (RewardFault, SystemExit, KeyboardInterrupt) as error:  # the message is enough
        return {"error": one_line(error, MAX_ERROR_CHARS), "traceback": ""}
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
        return {"error": one_line(error, MAX_ERROR_CHARS), "traceback": traceback.format_exc()[-MAX_TRACEBACK_CHARS:]}


def _extend_sys_path(folders: list[str]) -> None:
    """Put folders that the pool's process has added to its `sys.path` since this worker started before the others."""
    new = [each for each in folders if each not in sys.path]
    sys.path[:0] = new
    if new:
        importlib.invalidate_caches()


# Loading a function, and matching arguments to its signature. `building` does the same for functions in its process.


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
        raise RewardFault(f"it needs {', '.join(map(repr, missing))}, but the row has only {columns}")
    positional = [values.pop(name) for name, each in parameters.items() if each.kind is each.POSITIONAL_ONLY]
    return positional, values


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


if __name__ == "__main__":
    main()
