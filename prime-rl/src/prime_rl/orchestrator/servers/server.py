"""HTTP client for one inference server: health, served models and weight updates."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from prime_rl.configs.shared import ClientConfig
from prime_rl.orchestrator.errors import InferenceFault
from prime_rl.orchestrator.rollouts.replies import check_reply, error_message
from prime_rl.orchestrator.servers.channel import ChatChannel, ServerAnswered
from prime_rl.orchestrator.servers.discovery import ServerNames
from prime_rl.utils.engine_keys import client_key
from prime_rl.utils.images import ShownImages
from prime_rl.utils.logger import get_logger

T = TypeVar("T")
HEALTHY = (200, 404)
"""Statuses of `/health` of a server that is up. Not every OpenAI-compatible server has this route."""
ADMIN_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 15.0
"""Limit for a connection. The kernel accepts it even if the server is busy; a node that is gone does not answer."""
MAX_RETRIES = 6
"""Retries of a model call, about 20 s in all. The health check removes a server that refuses connections earlier."""
UPDATE_PAUSES_S = (1.0, 2.0)
"""Pauses before retries of an update whose connection failed."""
ADAPTER_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0)
"""Pauses before retries of an adapter load. On a network filesystem, the server may see the files late."""
PROBE_MESSAGES = [{"role": "user", "content": "Hello"}]


async def unless(lost: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`. If the event is set first, cancels it, and returns None unless it ends with a result."""
    running, waiting = asyncio.create_task(work), asyncio.create_task(lost.wait())
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            # Code that catches the cancellation may still end well, and its effects then count.
            await asyncio.wait({running})
        return None if running.cancelled() else running.result()
    finally:
        running.cancel()
        waiting.cancel()


class InferenceServer:
    """One inference server."""

    def __init__(
        self,
        base_url: str,
        config: ClientConfig,
        model: str,
        adapter: str | None = None,
        images: ShownImages | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.root_url = self.base_url.removesuffix("/v1")
        self.base_model = model
        self.adapter = adapter
        """Name of the LoRA adapter that updates load; None if updates replace the model's weights."""
        self.model = model
        """Model name that new rollouts request: the base model, or the adapter once its first version is loaded."""
        self.images = images
        """Shows it images. None: they reach it as they are, and no training."""
        self.groups_in_flight = 0
        """Load of the server, as counted by its users."""
        self.lost = asyncio.Event()
        """Set once the pool has removed the server: its rollouts in flight are rolled out elsewhere."""
        self.in_group = False
        """Whether the server receives weights over NCCL. The trainer sends each version once, so nothing is retried."""
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self._config = config
        self.headers = _headers(config, self.base_url)
        self.channel = ChatChannel(self.base_url, self.headers, config.timeout, MAX_RETRIES)
        self.takes_tokens = False
        """Whether later turns of a conversation are sent as the sampled token ids, instead of text."""
        self._admin: aiohttp.ClientSession | None = None

    async def authenticate(self) -> None:
        """Read the server's key again: a server on this machine chooses a new one each time it starts."""
        headers = _headers(self._config, self.base_url)
        if headers == self.headers:
            return
        await self.close()
        self.headers, self._admin = headers, None
        self.channel = ChatChannel(self.base_url, headers, self._config.timeout, MAX_RETRIES)

    @property
    def timeout_s(self) -> float:
        """Limit of a model call."""
        return self._config.timeout

    async def is_ready(self) -> bool:
        """Whether `/health` returns 200, or there is no such route. A starting server refuses connections or returns
        503."""
        try:
            async with self._session().get(f"{self.root_url}/health") as response:
                return response.status in HEALTHY
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def is_gone(self) -> bool:
        """Whether the server cannot be connected to, or `/health` returns an error status.

        A late answer does not count: the server may be busy.
        """
        try:
            async with self._session().get(f"{self.root_url}/health") as response:
                return response.status not in HEALTHY
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            return True
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def served_models(self) -> list[str]:
        async with self._session().get(f"{self.base_url}/models") as response:
            await self._check(response)
            return [entry["id"] for entry in (await response.json())["data"]]

    async def has_token_route(self) -> bool:
        """Whether the server has the route that accepts token ids instead of messages."""
        # An existing route rejects the empty request with another status.
        async with self._session().post(f"{self.base_url}/chat/completions/tokens", json={}) as response:
            return response.status not in (404, 405)

    async def probe(self) -> int | None:
        """Sample one token to check that replies can be trained on.

        Returns:
            The server's policy version; None if it does not report one.

        Raises:
            InferenceFault: no reply, or a reply without token ids or log-probabilities.
        """
        channel = ChatChannel(self.base_url, self.headers, ADMIN_TIMEOUT_S, MAX_RETRIES)
        body = {"model": self.model, "messages": PROBE_MESSAGES, "max_completion_tokens": 1, "logprobs": True}
        try:
            reply = await channel.post("/chat/completions", {**body, "return_token_ids": True})
        except (ServerAnswered, aiohttp.ClientError, TimeoutError) as error:
            raise InferenceFault(f"{self.base_url} does not answer a chat request: {error}") from error
        finally:
            await channel.close()
        check_reply(reply, self.base_url)
        versions = reply.choices[0].weight_versions
        return versions[-1].version if versions else None

    async def update_weights(self, weight_dir: Path | None) -> None:
        """Load the weights or the adapter in `weight_dir`; None loads the base model's weights.

        Requests in flight continue with the new weights if they use the model that was replaced.

        Raises:
            InferenceFault: the server rejects the weights, or does not answer.
        """
        path = str(weight_dir.resolve()) if weight_dir else None
        try:
            if path is None or self.adapter is None:
                await self._update("/update_weights", {"weight_dir": path})
                self.model = self.base_model
            else:
                await self._update("/load_lora_adapter", {"lora_name": self.adapter, "lora_path": path})
                self.model = self.adapter
        except (ServerAnswered, aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise InferenceFault(
                f"{self.root_url} did not load the weights {weight_dir or 'of the base model'}: {reason}"
            ) from error

    async def free_memory(self) -> None:
        """Put the server to sleep: it frees the GPU's memory until the next update.

        Raises:
            InferenceFault: the server cannot sleep, or does not answer.
        """
        try:
            async with self._session().post(f"{self.root_url}/sleep") as response:
                await self._check(response)
        except (ServerAnswered, aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise InferenceFault(f"{self.root_url} did not go to sleep: {reason}") from error

    async def join_weight_group(self, host: str, port: int, place: tuple[int, int], timeout_s: int) -> None:
        """Join the trainer's weight group at `host:port`. `place` is the server's rank and the number of servers.

        Raises:
            InferenceFault: the server cannot join, or the trainer does not join within `timeout_s`.
        """
        body = {"host": host, "port": port, "server_rank": place[0], "num_inference_server": place[1]}
        # The server itself gives up after `timeout_s`, and returns the reason.
        limit = aiohttp.ClientTimeout(total=timeout_s + ADMIN_TIMEOUT_S)
        url = f"{self.root_url}/init_broadcaster"
        try:
            async with self._session().post(url, json=body | {"timeout": timeout_s}, timeout=limit) as response:
                await self._check(response)
        except (ServerAnswered, aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise InferenceFault(f"{self.root_url} did not join the trainer's weight group: {reason}") from error
        self.in_group = True

    async def _update(self, route: str, body: dict[str, str | None]) -> None:
        """Post an update, and retry faults that may be temporary."""
        for attempt in itertools.count():
            try:
                async with self._session().post(f"{self.root_url}{route}", json=body) as response:
                    await self._check(response)
                return
            except (ServerAnswered, aiohttp.ClientConnectionError) as error:
                pauses_s = () if self.in_group else _retry_pauses_s(route, error)
                if attempt >= len(pauses_s):
                    raise
                get_logger().warning(f"Retrying in {pauses_s[attempt]:.0f} s: {error}")
                await self.sleep(pauses_s[attempt])

    async def close(self) -> None:
        await self.channel.close()
        if self._admin is not None:
            await self._admin.close()

    def _session(self) -> aiohttp.ClientSession:
        # A separate session, so that health checks and updates do not queue up after model calls.
        if self._admin is None:
            # Each call opens a new connection: an update must not fail because the server closed an idle one.
            self._admin = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True, resolver=ServerNames()),
                headers=self.headers,
                timeout=aiohttp.ClientTimeout(total=ADMIN_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S),
            )
        return self._admin

    @staticmethod
    async def _check(response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            raise ServerAnswered(str(response.url), response.status, error_message(await response.read()))


def _retry_pauses_s(route: str, error: Exception) -> Sequence[float]:
    """Pauses before the retries of an update that failed with `error`; empty for a permanent fault."""
    if not isinstance(error, ServerAnswered):
        return UPDATE_PAUSES_S
    # 404: the server does not see the adapter's files yet.
    is_temporary = route == "/load_lora_adapter" and (error.status == 404 or error.status >= 500)
    return ADAPTER_PAUSES_S if is_temporary else ()


def _headers(config: ClientConfig, base_url: str) -> dict[str, str]:
    key = client_key(base_url, config.api_key_var)
    from_key = {} if key is None else {"Authorization": f"Bearer {key}"}
    from_env = {name: os.environ[variable] for name, variable in config.headers_from_env.items()}
    return {**from_key, **config.headers, **from_env}
