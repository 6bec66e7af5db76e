"""Runs the attempts of one agent.

In a process of its own, so that code which blocks, exits or crashes takes only attempts with it. `boot.py` starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib.util
import os
import signal
import socket
import sys
from functools import partial
from typing import Any

from prime_rl.environments.agents.attempting import HUNG_THREADS, Attempts
from prime_rl.environments.agents.context import Attempt
from prime_rl.environments.agents.targets import BadTarget, Target, load_target, needs_client
from prime_rl.orchestrator.guests.inside.frames import BadFrame, encode, receive, receive_now
from prime_rl.orchestrator.guests.inside.judge_arguments import NoJudge, offered_arguments

_DEATH_SIGNAL = 1
"""The option PR_SET_PDEATHSIG of prctl, on Linux."""


def main() -> None:
    """Greet, and make attempts until the orchestrator's end of the socket closes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.set_inheritable(False)
        os.register_at_fork(after_in_child=connection.close)
        start = receive_now(connection)
        if start is None:
            return
        # An agent is found where the run starts.
        given = start["attributes"]["path"]
        sys.path[:] = [*given, *(place for place in sys.path if place not in given)]
        try:
            offered = partial(offered_arguments, start["judge"], repr(start["module"]))
            target = load_target(start["module"], start["args"], offered)
            _refuse_without_client(target)
        except (BadTarget, NoJudge) as error:
            connection.sendall(encode({"fault": str(error)}))
            return
        connection.sendall(encode({"python": sys.version.split()[0]}))
        gc.freeze()  # what is loaded stays: collections need not look at it
        asyncio.run(_serve(Attempts(target), connection))
    # Threads of the agent must not keep the process alive.
    os._exit(0)


def _refuse_without_client(target: Target) -> None:
    """Raises BadTarget if the target asks the model through a package that is not installed."""
    if needs_client(target) and importlib.util.find_spec("openai") is None:
        raise BadTarget("it asks the model through the package openai, which is not installed there")


async def _serve(attempts: Attempts, connection: socket.socket) -> None:
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection)
    tasks: dict[int, asyncio.Task[None]] = {}
    while (request := await receive(reader)) is not None:
        if request["do"] == "cancel":
            if (task := tasks.get(request["of"])) is not None:
                task.cancel()
            continue
        task = asyncio.create_task(_answer(attempts, request, writer))
        tasks[request["id"]] = task
        task.add_done_callback(partial(_forget, tasks, request["id"]))
    for task in tasks.values():
        task.cancel()


def _forget(tasks: dict[int, asyncio.Task[None]], number: int, task: asyncio.Task[None]) -> None:
    tasks.pop(number, None)


async def _answer(attempts: Attempts, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    given = request["with"]
    value: dict[str, Any] | None = None
    if request["do"] == "attempt":
        value = await attempts.make(given["row"], given["session"], Attempt(given["task_id"], given["is_eval"]))
    try:
        answer = encode({"id": request["id"], "value": value})
    except (BadFrame, RecursionError, ValueError) as error:
        failed = {"error": type(error).__name__, "detail": str(error)}
        answer = encode({"id": request["id"], "value": failed})
    with contextlib.suppress(ConnectionError):
        writer.write(answer)
        await writer.drain()
    if attempts.hung_threads >= HUNG_THREADS:
        sys.stderr.write(f"{HUNG_THREADS} threads of the agent did not end in time; its process starts again\n")
        sys.stderr.flush()
        os._exit(1)
