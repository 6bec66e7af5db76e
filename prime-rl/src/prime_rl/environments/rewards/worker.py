"""Worker process that calls reward functions: `python -m prime_rl.environments.rewards.worker`, started by the pool.

It reads requests from its standard input and writes replies to its standard output. Output of functions is discarded.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from typing import Any

from prime_rl.environments.rewards.calling import BadFunction, arguments, checked, describe, load
from prime_rl.environments.rewards.wire import Ended, encode, receive, send

_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""
MAX_TRACEBACK_CHARS = 4000


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
        function = load(request["fn"], warm=request["do"] != "call")
        if request["do"] == "import":
            return {"value": 0.0}
        if request["do"] == "describe":
            note = getattr(sys.modules[request["fn"].rpartition(":")[0]], "note", None)
            return {"described": {**describe(function), "note": note(request["args"]) if note is not None else ""}}
        positional, keywords = arguments(function, request["given"])
        return {"value": checked(function(*positional, **keywords))}
    except BadFunction as error:
        return {"error": str(error), "traceback": ""}
    except KeyboardInterrupt as error:
        return {"error": f"{type(error).__name__}", "traceback": ""}
    except SystemExit as error:
        return {"error": f"it called sys.exit({error.code!r})", "traceback": ""}
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
        return {"error": _one_line(error), "traceback": traceback.format_exc()[-MAX_TRACEBACK_CHARS:]}


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


if __name__ == "__main__":
    main()
