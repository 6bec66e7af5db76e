"""An environment over ZeroMQ: verifiers' wire protocol, in one process and one event loop.

verifiers' own server keeps a router and workers and starts a dead worker again, for ever where its environment cannot
load. Here a fault ends the process, and whoever started it sees the log. Model calls go through our chat clients.

A request is `[client, id, body]` in MessagePack. The body `ping` asks whether the server lives, an empty one cancels
the request of that id. An answer is `[client, id, body]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgpack
import verifiers as vf
import zmq
import zmq.asyncio
from verifiers.clients import resolve_client
from verifiers.serve.types import RunGroupRequest, RunRolloutRequest
from verifiers.types import ClientConfig
from verifiers.utils.serve_utils import msgpack_encoder

from prime_rl.orchestrator.rollouts.chat_client import ChatClient, TokenChatClient
from prime_rl.utils.logger import get_logger

PING = b"ping"
CLIENTS = {"openai_chat_completions": ChatClient, "openai_chat_completions_token": TokenChatClient}


class EnvironmentService:
    """Answers requests until it is closed. What the environment raises goes back as the answer."""

    def __init__(self, env: vf.Environment, address: str) -> None:
        self.env = env
        self.address = address
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # No request may be dropped: the orchestrator bounds how many there are.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._clients: dict[str, vf.Client] = {}
        self._running: dict[tuple[bytes, bytes], asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Serve for ever."""
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3:
                get_logger().warning(f"A message of {len(frames)} parts instead of 3 is left out")
                continue
            client, request_id, body = frames
            if body == PING:
                await self._send(client, request_id, {"success": True, "error": None})
            elif not body:
                self._cancel(client, request_id)
            else:
                self._start(client, request_id, body)

    async def close(self) -> None:
        """Cancel what runs, and let the environment clean up."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        for client in self._clients.values():
            await client.close()
        await self.env._teardown()
        self._socket.close()
        self._context.term()

    def _start(self, client: bytes, request_id: bytes, body: bytes) -> None:
        task = asyncio.create_task(self._answer(client, request_id, body))
        self._running[client, request_id] = task
        task.add_done_callback(lambda _: self._running.pop((client, request_id), None))

    def _cancel(self, client: bytes, request_id: bytes) -> None:
        task = self._running.get((client, request_id))
        if task is not None:
            task.cancel()

    async def _answer(self, client: bytes, request_id: bytes, body: bytes) -> None:
        try:
            answer = {"success": True, "error": None, **await self._run(msgpack.unpackb(body, raw=False))}
        except Exception as error:  # noqa: BLE001 - an environment's own code may raise anything
            get_logger().warning("A request failed", exc_info=True)
            answer = {"success": False, "error": repr(error)}
        await self._send(client, request_id, answer)

    async def _run(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["request_type"] == "run_group":
            group = RunGroupRequest.model_validate(body)
            outputs = await self.env.run_group(group.group_inputs, *self._arguments(group))
            return {"outputs": outputs}
        one = RunRolloutRequest.model_validate(body)
        return {"output": await self.env.run_rollout(one.input, *self._arguments(one))}

    def _arguments(self, request: RunGroupRequest | RunRolloutRequest) -> Iterable[Any]:
        client = self._client(request.client_config)
        return client, request.model, request.sampling_args, request.max_retries, request.state_columns

    def _client(self, config: ClientConfig) -> vf.Client:
        key = config.model_dump_json()
        if key not in self._clients:
            self._clients[key] = CLIENTS.get(config.client_type, resolve_client)(config)
        return self._clients[key]

    async def _send(self, client: bytes, request_id: bytes, answer: dict[str, Any]) -> None:
        await self._socket.send_multipart([client, request_id, msgpack.packb(answer, default=msgpack_encoder)])
