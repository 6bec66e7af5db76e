"""Groups of an environment that an `env-server` runs: the client's end of verifiers' ZeroMQ protocol."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack
from threading import Thread
from typing import Any, TypeVar

import verifiers as vf
import zmq
from verifiers.serve import ZMQEnvClient

from prime_rl.orchestrator.errors import EnvironmentFault, GroupFailed
from prime_rl.orchestrator.rollouts.rollout import Rollout
from prime_rl.orchestrator.servers.server import MAX_RETRIES, InferenceServer, unless
from prime_rl.orchestrator.workers.environment import Described, GroupRequest, Split
from prime_rl.orchestrator.workers.failures import in_time
from prime_rl.orchestrator.workers.in_memory import described, outputs_of, rollouts_of
from prime_rl.orchestrator.workers.service import TOKEN_CLIENT
from prime_rl.run.process import own_beats, server_name
from prime_rl.transport.endpoints import Endpoint, TransportError
from prime_rl.utils.errors import one_line
from prime_rl.utils.logger import get_logger
from prime_rl.utils.scratch import scratch_directory

T = TypeVar("T")
SERVER_STARTUP_TIMEOUT_S = 600.0
_ERROR_NAME = re.compile(r"(?:\w+\.)*(\w+)[(:]")
"""The class that an error's text begins with."""


class PortWorker:
    """Sends the groups of a verifiers environment to its server. The rows are read in this process."""

    def __init__(self, name: str, env: vf.Environment, address: str, is_ours: bool = False) -> None:
        """`is_ours`: this run starts the server, which then reports its model calls itself."""
        self.name = name
        self.env = env
        self.address = address
        self._is_ours = is_ours
        self._tunnel: Tunnel | None = None
        self._life = ServerLife()

    def describe(self, split: Split) -> Described:
        return described(self.env, split)

    async def open(self) -> None:
        """Connect to the server.

        Raises:
            EnvironmentFault: the server does not answer within 600 s, or its address needs a key that is not set.
        """
        try:
            endpoint = Endpoint.of_address(self.address)
        except TransportError as error:
            raise EnvironmentFault(f"the address of environment {self.name!r}: {error}") from error
        if not endpoint.is_local:
            self._tunnel = Tunnel(endpoint)
        address = endpoint.address if self._tunnel is None else self._tunnel.address
        server = f"the server of environment {self.name!r} at {self.address}"
        get_logger().info(f"Waiting for {server} (limit: {SERVER_STARTUP_TIMEOUT_S:g} s)")
        client = ZMQEnvClient(address, name=self.name, startup_timeout=SERVER_STARTUP_TIMEOUT_S)
        try:
            await client.wait_for_server_startup()
        except TimeoutError as error:
            raise EnvironmentFault(
                f"{server} does not answer within {SERVER_STARTUP_TIMEOUT_S:g} s: start it with "
                f"`env-server --env.id ID --env.address {self.address}`"
            ) from error
        self.env.env_client = client

    async def roll_out(self, group: GroupRequest) -> list[Rollout]:
        server = group.server
        calling = contextlib.nullcontext() if self._is_ours else own_beats().calling(server_name(server.base_url))
        async with in_time(group.timeout_s, group.example.env, group.example.row):
            with calling, _named_failures():
                outputs = await self._life.of(outputs_of(self.env, group, _client_config(server)))
        return rollouts_of(outputs, group)

    def waits_for(self) -> str:
        return ""

    def server_ended(self, why: str) -> bool:
        """Fail the groups that the server had. Returns whether it had answered any since its start."""
        life, self._life = self._life, ServerLife()
        return life.end(why)

    async def close(self) -> None:
        if self.env.env_client is not None:
            await self.env.env_client.close()
        if self._tunnel is not None:
            self._tunnel.close()


def _client_config(server: InferenceServer) -> vf.ClientConfig:
    """How the server's own proxy asks the model."""
    return vf.ClientConfig(
        client_type=TOKEN_CLIENT if server.takes_tokens else "openai_chat_completions",
        api_base_url=server.base_url,
        timeout=server.timeout_s,
        max_retries=MAX_RETRIES,
        extra_headers=server.headers,
    )


@contextlib.contextmanager
def _named_failures() -> Iterator[None]:
    """verifiers' client raises a RuntimeError with the text of whatever the server's environment raised."""
    try:
        yield
    except RuntimeError as error:
        named = _ERROR_NAME.match(str(error))
        raise GroupFailed(one_line(f"{type(error).__name__}: {error}"), named[1] if named else "") from error


class ServerLife:
    """One life of a server, from its start until its process ends, with the groups that it has.

    When it ends, they fail: verifiers' client would send them to the next one, again and again if one of them ends it.
    """

    def __init__(self) -> None:
        self._has_ended = False
        self._ends: set[asyncio.Event] = set()
        """One for each group that it has, so that groups may be of different event loops."""
        self._has_answered = False
        self._why = ""
        self._is_counted = False

    async def of(self, group: Coroutine[Any, Any, T]) -> T:
        """The result of a group. Raises GroupFailed if the server ends before; only the first one counts against the
        environment."""
        ended = asyncio.Event()
        if self._has_ended:
            ended.set()
        self._ends.add(ended)
        try:
            outputs = await unless(ended, group)
        except Exception:
            self._has_answered = True
            raise
        finally:
            self._ends.discard(ended)
        if outputs is None:
            if not ended.is_set():
                raise asyncio.CancelledError  # by the environment's own code
            is_first, self._is_counted = not self._is_counted, True
            raise GroupFailed(self._why, "EnvironmentEnded", is_of_environment=is_first)
        self._has_answered = True
        return outputs

    def end(self, why: str) -> bool:
        """Fail its groups. Returns whether it had answered any before."""
        self._why = why
        self._has_ended = True
        for ended in self._ends:
            ended.set()
        return self._has_answered


class Tunnel:
    """Forwards between a Unix socket for this process and an encrypted TCP connection.

    verifiers' client opens its sockets itself and cannot encrypt. The server gets each message with one more frame in
    front, the client's identity, and returns it with the answer.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._closing = ExitStack()
        self.address = f"ipc://{self._closing.enter_context(scratch_directory('env-tunnel'))}/socket"
        self._context = zmq.Context()
        clients, server = (self._context.socket(kind) for kind in (zmq.ROUTER, zmq.DEALER))
        for socket in (clients, server):
            # No limits, so that no message is dropped; the orchestrator limits the requests in flight.
            socket.sndhwm = socket.rcvhwm = socket.linger = 0
        clients.bind(self.address)
        endpoint.connect(server)
        self._thread = Thread(target=_forward, args=(clients, server), name="env tunnel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._context.term()
        self._thread.join()
        self._closing.close()


def _forward(clients: zmq.Socket[bytes], server: zmq.Socket[bytes]) -> None:
    try:
        zmq.proxy(clients, server)
    except zmq.ContextTerminated:
        clients.close()
        server.close()
