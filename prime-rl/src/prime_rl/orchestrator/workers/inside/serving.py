"""Answers the orchestrator's requests until its end of the socket closes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from .blocking import LoopWatch
from .frames import PROTOCOL, encode, receive, receive_now
from .judge_arguments import judge_arguments

_DEATH_SIGNAL = 1
"""The option PR_SET_PDEATHSIG of prctl, on Linux."""
OLDEST_FOR_AGENTS = (3, 11)


class Unusable(Exception):
    """What is served cannot be loaded. The message is one line."""


class Ending(Exception):
    """The process ends; the orchestrator starts another one."""


def main() -> None:
    serve_parent(_load)


def serve_parent(load: Callable[[dict[str, Any]], Any]) -> None:
    """Load what the orchestrator's first message names, and answer its requests. Ends the process.

    The last argument of the command is the number of the socket. `load` makes the object whose methods it may call.
    """
    _end_with_parent()
    with socket.socket(fileno=int(sys.argv[-1])) as connection:
        _keep_from_children(connection)
        start = receive_now(connection)
        if start is None:
            return
        try:
            served = load(start)
        except Unusable as error:
            connection.sendall(encode({"id": start["id"], "fault": str(error)}))
            return
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an environment's own code may raise anything
            connection.sendall(encode({"id": start["id"], "fault": _one_line(error)}))
            return
        connection.sendall(encode({"id": start["id"], "python": sys.version.split()[0], **_versions()}))
        # What is loaded stays. Rollouts make garbage fast, and each full collection would look at all of it.
        gc.freeze()
        asyncio.run(_serve(served, connection, LoopWatch({"": start.get("module", "")})))
    # Threads of the environment must not keep the process alive.
    os._exit(0)


def _end_with_parent() -> None:
    """Die with the orchestrator, even while the environment's code does not let go of the interpreter."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _keep_from_children(connection: socket.socket) -> None:
    """Close the connection in processes that the environment starts. One that outlives this process would hold it open,
    and the orchestrator would wait for answers forever."""
    connection.set_inheritable(False)
    os.register_at_fork(after_in_child=connection.close)


def _load(start: dict[str, Any]) -> Any:
    if start["protocol"] != PROTOCOL:
        raise RuntimeError(f"the orchestrator uses version {start['protocol']} of the protocol, not {PROTOCOL}")
    if "--agent" in sys.argv:
        if sys.version_info < OLDEST_FOR_AGENTS:
            oldest = ".".join(map(str, OLDEST_FOR_AGENTS))
            raise Unusable(f"an agent needs Python {oldest} or later; this is {sys.version.split()[0]}")
        from . import agent

        return agent.Served(start)
    import verifiers

    # 0.3 has both interfaces, and 0.4 only v1.
    if start["taskset"] or start["agent"] or not hasattr(verifiers, "load_environment"):
        from . import verifiers_v1

        if start["judge"]:
            raise RuntimeError("judge: leave it out: a taskset of verifiers v1 configures its judges in its own table")
        if start.get("threads"):
            raise RuntimeError("threads: leave it out: verifiers v1 has no such interface; num_workers helps")
        return verifiers_v1.Served(start)
    from . import verifiers_api

    given = judge_arguments(start["module"], start.get("judge"))
    return verifiers_api.load({**start, "args": {**given, **start["args"]}})


def _versions() -> dict[str, str]:
    if "--agent" in sys.argv:
        return {}
    from importlib.metadata import version

    return {"verifiers": version("verifiers")}


async def _serve(served: Any, connection: socket.socket, watch: LoopWatch) -> None:
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection)
    tasks: dict[int, asyncio.Task[None]] = {}
    pending: set[asyncio.Task[None]] = set()
    pending.add(asyncio.create_task(watch.measure()))
    async with cancelled_on_exit(pending):
        while (request := await receive(reader)) is not None:
            if request["do"] == "cancel":
                if (task := tasks.get(request["of"])) is not None:
                    task.cancel()
                continue
            task = asyncio.create_task(_send_answer(served, request, writer, watch))
            tasks[request["id"]] = task
            pending.add(task)
            task.add_done_callback(pending.discard)
            task.add_done_callback(partial(_forget, tasks, request["id"]))
    await served.close()


def _forget(tasks: dict[int, asyncio.Task[None]], number: int, task: asyncio.Task[None]) -> None:
    tasks.pop(number, None)


async def answer_to(
    served: Any, request: dict[str, Any], watch: LoopWatch, encode: Callable[[dict[str, Any]], bytes] = encode
) -> bytes:
    """The encoded answer to a request, whatever happens: the other end waits hours for it."""
    try:
        done = getattr(served, request["do"])(**request["with"])
        value = await done if asyncio.iscoroutine(done) else done
        # Within the block: a value that cannot be sent is an error, too.
        return encode({"id": request["id"], "value": value, "loop": watch.take()})
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an environment's own code may raise anything
        return encode({"id": request["id"], "error": _one_line(error), "kind": type(error).__name__})
    except asyncio.CancelledError as error:
        # The environment may have cancelled its own task. The orchestrator ignores answers that it does not wait for.
        return encode({"id": request["id"], "error": "it was cancelled", "kind": type(error).__name__})


async def _send_answer(served: Any, request: dict[str, Any], writer: asyncio.StreamWriter, watch: LoopWatch) -> None:
    answer = await answer_to(served, request, watch)
    with contextlib.suppress(ConnectionError):
        writer.write(answer)
        await writer.drain()
    try:
        served.after_answer()
    except Ending as why:
        sys.stderr.write(f"{why}\n")
        sys.stderr.flush()
        os._exit(1)


def _one_line(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    # verifiers hides why an import failed behind an error of its own.
    texts = [" ".join(str(each).split()) for each in (error, error.__cause__) if each is not None]
    return f"{type(error).__name__}: {': '.join(texts)}"


@contextlib.asynccontextmanager
async def cancelled_on_exit(tasks: set[asyncio.Task[None]]) -> AsyncIterator[None]:
    """Cancel the tasks at the end of the block, and wait for them."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
