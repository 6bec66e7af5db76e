"""Both ends of an environment server at an address: the messages of `inside/frames` over ZeroMQ.

`Endpoint` keeps strangers out: an address on this machine is a Unix socket that only this user can reach, and any other
is encrypted with the key that both ends share.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from prime_rl.orchestrator.errors import EnvironmentFault
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
            # Only the first counts against the environment.
            for number, waiting in enumerate([each for each in self._waiting.values() if not each.done()]):
                ended = WorkerEnded(f"{self._who} has ended", "EnvironmentEnded", is_of_environment=number == 0)
                waiting.set_exception(ended)

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            answer = decode(await socket.recv())
            waiting = self._waiting.get(answer["id"])
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

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


async def serve_port(served: Any, socket: zmq.asyncio.Socket) -> None:
    """Answer requests with the methods of `served`, until cancelled. Requests then running end with an error."""
    running: dict[tuple[bytes, int], asyncio.Task[None]] = {}
    pending: set[asyncio.Task[None]] = set()

    async def answer(client: bytes, request: dict[str, Any]) -> None:
        await socket.send_multipart([client, await answer_to(served, request, dump)])

    def forget(key: tuple[bytes, int], task: asyncio.Task[None]) -> None:
        running.pop(key, None)
        pending.discard(task)

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
