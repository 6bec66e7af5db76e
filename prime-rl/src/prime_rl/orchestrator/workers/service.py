"""Serves an environment over ZeroMQ with verifiers' wire protocol, in one process and one event loop.

verifiers' own server has a router that restarts dead workers, endlessly if the environment cannot load. Here an error
ends the process, and its log shows the cause. Model calls go through the recording proxy of this process.

Requests and answers have at least three frames, `[client, …, id, body]`, with a MessagePack body. The body `ping` is a
health check; an empty body cancels the request with that id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgpack
import verifiers as vf
import zmq
import zmq.asyncio
from verifiers.serve.types import RunGroupRequest, RunRolloutRequest
from verifiers.types import ClientConfig
from verifiers.utils.serve_utils import msgpack_encoder

from prime_rl.orchestrator.proxy.continuation import EndsOfTurns
from prime_rl.orchestrator.servers.channel import ChatChannel
from prime_rl.orchestrator.workers.in_memory import SessionClient
from prime_rl.transport.endpoints import Endpoint
from prime_rl.utils.logger import get_logger

PING = b"ping"
Route = tuple[bytes, ...]
"""The client's identity, and those of the tunnels before it."""
TOKEN_CLIENT = "openai_chat_completions_token"
"""The kind of client that sends later turns as token ids."""


@dataclass(frozen=True, slots=True)
class _Upstream:
    """An inference server that a request names."""

    channel: ChatChannel
    base_model: str


class EnvironmentService:
    """Answers requests until it is closed. Errors of the environment are returned as answers."""

    def __init__(self, env: vf.Environment, address: str) -> None:
        """Start listening.

        Raises:
            TransportError: the address is in use, or is on the network and there is no shared key.
        """
        self.env = env
        self.address = address
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # No limits, so that no message is dropped; the orchestrator limits the requests in flight.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        Endpoint.of_address(address).bind(self._socket)
        self._channels: dict[str, ChatChannel] = {}
        self._ends = EndsOfTurns()
        self._running: dict[tuple[Route, bytes], asyncio.Task[None]] = {}
        self._unanswered: set[tuple[Route, bytes]] = set()

    async def serve(self) -> None:
        """Serve until cancelled."""
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) < 3:
                get_logger().warning(f"Ignoring a message of {len(frames)} frames, which has no id or no body")
                continue
            *route, request_id, body = frames
            client = tuple(route)
            if body == PING:
                await self._socket.send_multipart([*client, request_id, _packed({"success": True, "error": None})])
            elif not body:
                await self._cancel(client, request_id)
            else:
                self._start(client, request_id, body)

    async def close(self) -> None:
        """Cancel all requests, tear down the environment and close the socket."""
        self._unanswered.clear()  # nobody cancelled them: clients learn that the server has ended
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()
        await self.env._teardown()
        self._socket.close()
        self._context.term()

    def _start(self, client: Route, request_id: bytes, body: bytes) -> None:
        self._unanswered.add((client, request_id))
        task = asyncio.create_task(self._answer(client, request_id, body))
        self._running[client, request_id] = task
        task.add_done_callback(lambda _: self._running.pop((client, request_id), None))

    async def _cancel(self, client: Route, request_id: bytes) -> None:
        if (client, request_id) in self._unanswered:
            self._running[client, request_id].cancel()
            await self._send(client, request_id, _CANCELLED)

    async def _send(self, client: Route, request_id: bytes, answer: bytes) -> None:
        self._unanswered.discard((client, request_id))
        await self._socket.send_multipart([*client, request_id, answer])

    async def _answer(self, client: Route, request_id: bytes, body: bytes) -> None:
        """Run a request, and answer it whatever happens: a client waits hours for an answer."""
        try:
            value = await self._run(msgpack.unpackb(body, raw=False))
            answer = _packed({"success": True, "error": None, **value})
        except asyncio.CancelledError:
            answer = _CANCELLED  # by the environment's own code, or by the client, which has its answer
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an environment's own code may raise anything
            get_logger().warning("A request failed", exc_info=True)
            answer = _packed({"success": False, "error": repr(error)})
        if (client, request_id) in self._unanswered:
            await self._send(client, request_id, answer)

    async def _run(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["request_type"] == "run_group":
            group = RunGroupRequest.model_validate(body)
            outputs = await self.env.run_group(group.group_inputs, *self._arguments(group))
            return {"outputs": outputs}
        one = RunRolloutRequest.model_validate(body)
        return {"output": await self.env.run_rollout(one.input, *self._arguments(one))}

    def _arguments(self, request: RunGroupRequest | RunRolloutRequest) -> Iterable[Any]:
        config = request.client_config
        server = _Upstream(self._channel(config), request.model)
        client = SessionClient(server, self._ends, config.client_type == TOKEN_CLIENT)
        return client, request.model, request.sampling_args, request.max_retries, request.state_columns

    def _channel(self, config: ClientConfig) -> ChatChannel:
        key = config.model_dump_json()
        if key not in self._channels:
            self._channels[key] = ChatChannel(
                config.api_base_url, config.extra_headers, config.timeout, config.max_retries
            )
        return self._channels[key]


def _packed(answer: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(answer, default=msgpack_encoder)
    return packed


_CANCELLED = _packed({"success": False, "error": "CancelledError: the request was cancelled"})
