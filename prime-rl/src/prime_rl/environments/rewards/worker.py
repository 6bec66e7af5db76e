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

from prime_rl.environments.rewards.calling import arguments, checked, describe, load
from prime_rl.environments.rewards.registry import RewardFault
from prime_rl.environments.rewards.wire import Ended, encode, receive, send
from prime_rl.utils.errors import one_line

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
        function = load(request["fn"], warm=request["do"] != "call")
        if request["do"] == "import":
            return {"value": 0.0}
        if request["do"] == "describe":
            note = getattr(sys.modules[request["fn"].rpartition(":")[0]], "note", None)
            return {"described": {**describe(function), "note": note(request["args"]) if note is not None else ""}}
        positional, keywords = arguments(function, request["given"])
        return {"value": checked(function(*positional, **keywords))}
    except (RewardFault, SystemExit, KeyboardInterrupt) as error:  # the message is enough
        return {"error": one_line(error, MAX_ERROR_CHARS), "traceback": ""}
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
        return {"error": one_line(error, MAX_ERROR_CHARS), "traceback": traceback.format_exc()[-MAX_TRACEBACK_CHARS:]}


if __name__ == "__main__":
    main()
