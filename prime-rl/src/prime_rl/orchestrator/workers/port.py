"""Both ends of an environment server at an address: the messages of `inside/frames` over ZeroMQ.

`Endpoint` keeps strangers out: an address on this machine is a Unix socket that only this user can reach, and any other
is encrypted with the key that both ends share.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.workers.blocked import Report, ignore_report
from prime_rl.orchestrator.workers.inside.blocking import LoopWatch
from prime_rl.orchestrator.workers.inside.frames import BadFrame, decode, dump
from prime_rl.orchestrator.workers.inside.serving import answer_to, cancelled_on_exit
from prime_rl.orchestrator.workers.process import WorkerEnded, value_of
from prime_rl.transport.endpoints import Endpoint, TransportError
from prime_rl.utils.logger import get_logger

STARTUP_TIMEOUT_S = 600.0
"""Longest time without a connection to the server."""
HEARTBEAT_S = 5
"""Seconds between ZeroMQ's own heartbeats. After three without an answer, the server's machine counts as gone."""


class PortClient:
    """Asks the environment server at an address. After it has ended, requests wait for the next one there."""

    blocked_s = None
    """A server of somebody else is not replaced when its code blocks it."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._who = f"the server of environment {name!r} at {address}"
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._is_connected = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.report: Report = ignore_report

    @contextlib.contextmanager
    def chosen(self) -> Iterator[PortClient]:
        """This one: there is no other."""
        yield self

    async def open(self) -> None:
        """Connect to the server.

        Raises:
            EnvironmentFault: the server does not answer within 600 s, or its address needs a key that is not set.
        """
        try:
            endpoint = Endpoint.of_address(self.address)
        except TransportError as error:
            raise EnvironmentFault(f"the address of environment {self.name!r}: {error}") from error
        get_logger().info(f"Waiting for {self._who} (limit: {STARTUP_TIMEOUT_S:g} s)")
        self._socket = self._context.socket(zmq.DEALER)
        # No limits, so that no message is dropped; the orchestrator limits the requests in flight.
        self._socket.sndhwm = self._socket.rcvhwm = self._socket.linger = 0
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = 1000 * HEARTBEAT_S, 3000 * HEARTBEAT_S
        # A handshake, because a connection alone says nothing about the key.
        monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        endpoint.connect(self._socket)
        self._tasks = [asyncio.create_task(each) for each in (self._watch(monitor), self._read(self._socket))]
        await self.ask("ping")

    async def ask(self, do: str, limit_s: float | None = None, **arguments: Any) -> Any:
        """The answer to one request. Cancelling it cancels the work there. `limit_s` is not used.

        Raises:
            WorkerError: the environment's code failed.
            WorkerEnded: the server has ended.
            EnvironmentFault: there is no connection within 600 s.
        """
        assert self._socket is not None
        try:
            async with asyncio.timeout(STARTUP_TIMEOUT_S):
                await self._is_connected.wait()
        except TimeoutError as error:
            raise EnvironmentFault(
                f"{self._who} does not answer within {STARTUP_TIMEOUT_S:g} s: start it with "
                f"`env-server --env.id ID --env.address {self.address}`"
            ) from error
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._socket.send(dump({"id": number, "do": do, "with": arguments}))
            return value_of(await answer)
        except asyncio.CancelledError:
            self._socket.send(dump({"do": "cancel", "of": number}))
            raise
        finally:
            del self._waiting[number]

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Fail the requests of a server that has ended: sent again, one of them could end each server after it."""
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_connected.set()
                continue
            self._is_connected.clear()
            self._fail(f"{self._who} has ended")

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            try:
                answer = decode(await socket.recv())
                number = answer.get("id")
                if not isinstance(number, int):
                    raise BadFrame("a message that answers no request")
                if "loop" in answer:  # an older server sends none
                    self.report(answer["loop"])
            except BadFrame as error:
                # Which request it answers cannot be known.
                self._fail(f"{self._who} sent {error}")
                continue
            waiting = self._waiting.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

    def _fail(self, why: str) -> None:
        """Fail all requests. Only the first counts against the environment."""
        for number, waiting in enumerate([each for each in self._waiting.values() if not each.done()]):
            waiting.set_exception(WorkerEnded(why, "EnvironmentEnded", is_of_environment=number == 0))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)  # with the monitor's socket


@asynccontextmanager
async def listening(address: str) -> AsyncIterator[zmq.asyncio.Socket]:
    """A socket for `serve_port`. Raises TransportError: the address is in use, or is on the network without a key."""
    endpoint = Endpoint.of_address(address)
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.sndhwm = socket.rcvhwm = socket.linger = 0
    try:
        endpoint.bind(socket)
        yield socket
    finally:
        context.destroy(linger=0)


async def serve_port(served: Any, socket: zmq.asyncio.Socket, watch: LoopWatch) -> None:
    """Answer requests with the methods of `served`, until cancelled. Requests then running end with an error."""
    running: dict[tuple[bytes, int], asyncio.Task[None]] = {}
    pending: set[asyncio.Task[None]] = set()

    async def answer(client: bytes, request: dict[str, Any]) -> None:
        await socket.send_multipart([client, await answer_to(served, request, watch, dump)])

    def forget(key: tuple[bytes, int], task: asyncio.Task[None]) -> None:
        running.pop(key, None)
        pending.discard(task)

    pending.add(asyncio.create_task(watch.measure()))
    async with cancelled_on_exit(pending):
        while True:
            client, *frames = await socket.recv_multipart()
            try:
                request = decode(b"".join(frames))
                if request["do"] == "cancel":
                    if (task := running.get((client, request["of"]))) is not None:
                        task.cancel()
                    continue
                key = client, request["id"]
            except (BadFrame, KeyError) as error:
                get_logger().warning(f"Ignoring a message that is no request: {error!r}")
                continue
            task = running[key] = asyncio.create_task(answer(client, request))
            pending.add(task)
            task.add_done_callback(partial(forget, key))
