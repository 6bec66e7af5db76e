"""The inference servers of the policy: are they ready, what do they serve, and which weights do they hold."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import verifiers as vf

from prime_rl.configs.shared import ClientConfig
from prime_rl.orchestrator.chat_client import (
    ChatChannel,
    ChatClient,
    ServerAnswered,
    TokenChatClient,
    check_reply,
    error_message,
)
from prime_rl.orchestrator.errors import InferenceFault
from prime_rl.utils.logger import get_logger

READY_TIMEOUT_S = 1800.0
ADMIN_TIMEOUT_S = 600.0
FIRST_POLL_S, SLOWEST_POLL_S = 0.1, 1.0
MAX_RETRIES = 6
"""Attempts after the first, about 20 s in all. A server that refuses connections ends the run before that."""
UPDATE_ATTEMPTS = 3
WATCH_INTERVAL_S = 2.0
MISSED_WATCHES = 3
PROBE_MESSAGES = [{"role": "user", "content": "Hello"}]


class InferenceServer:
    """One server. `groups_in_flight` is the scheduler's account of its load."""

    def __init__(self, base_url: str, config: ClientConfig, model: str) -> None:
        self.base_url = base_url.rstrip("/")
        self.root_url = self.base_url.removesuffix("/v1")
        self.model = model
        self.groups_in_flight = 0
        self.headers = _headers(config)
        self.client_config = vf.ClientConfig(
            client_type="openai_chat_completions",
            api_key_var=config.api_key_var,
            api_base_url=self.base_url,
            timeout=config.timeout,
            max_retries=MAX_RETRIES,
            extra_headers=self.headers,
        )
        self.client: ChatClient = ChatClient(self.client_config)
        self._admin: aiohttp.ClientSession | None = None

    def use_tokens(self) -> None:
        """From now on, send the tokens of earlier turns as they were sampled."""
        self.client_config = self.client_config.model_copy(update={"client_type": "openai_chat_completions_token"})
        self.client = TokenChatClient(self.client_config)

    async def is_ready(self) -> bool:
        """Whether `/health` answers 200. A server that is starting refuses connections, or answers 503."""
        try:
            async with self._session().get(f"{self.root_url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def is_gone(self) -> bool:
        """Whether nothing listens at the address any more. A busy server that is slow to answer is not gone."""
        try:
            async with self._session().get(f"{self.root_url}/health"):
                return False
        except aiohttp.ClientConnectorError:
            return True
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def served_models(self) -> list[str]:
        async with self._session().get(f"{self.base_url}/models") as response:
            await self._check(response)
            return [entry["id"] for entry in (await response.json())["data"]]

    async def has_token_route(self) -> bool:
        """Whether the server takes token ids in place of messages. The route refuses an empty request."""
        async with self._session().post(f"{self.base_url}/chat/completions/tokens", json={}) as response:
            return response.status not in (404, 405)

    async def probe(self) -> int | None:
        """Sample one token, to see that answers can be trained on; the policy version, where the server tells."""
        channel = ChatChannel(self.base_url, self.headers, ADMIN_TIMEOUT_S, MAX_RETRIES)
        body = {"model": self.model, "messages": PROBE_MESSAGES, "max_completion_tokens": 1, "logprobs": True}
        try:
            reply = await channel.post("/chat/completions", body={**body, "return_token_ids": True})
        except (ServerAnswered, aiohttp.ClientError, TimeoutError) as error:
            raise InferenceFault(f"{self.base_url} does not answer a chat request: {error}") from error
        finally:
            await channel.close()
        check_reply(reply, self.base_url)
        versions = reply.choices[0].weight_versions
        return int(versions[-1]["version"]) if versions else None

    async def update_weights(self, weight_dir: Path | None) -> None:
        """Load the weights in `weight_dir`, or the base model's. Requests in flight go on with the new weights.

        Raises:
            InferenceFault: the server refuses them, or does not answer.
        """
        body = {"weight_dir": str(weight_dir.resolve()) if weight_dir else None}
        try:
            for attempt in range(1, UPDATE_ATTEMPTS + 1):
                try:
                    async with self._session().post(f"{self.root_url}/update_weights", json=body) as response:
                        await self._check(response)
                    return
                except aiohttp.ClientConnectionError:
                    if attempt == UPDATE_ATTEMPTS:
                        raise
                    await asyncio.sleep(attempt)
        except (ServerAnswered, aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise InferenceFault(
                f"{self.root_url} did not load the weights {weight_dir or 'of the base model'}: {reason}"
            ) from error

    async def close(self) -> None:
        await self.client.close()
        if self._admin is not None:
            await self._admin.close()

    def _session(self) -> aiohttp.ClientSession:
        # Apart from the rollouts' connections, so that no administrative call waits behind them.
        if self._admin is None:
            # Each call opens a connection: an update must not fail because the server closed an idle one.
            self._admin = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True),
                headers=self.headers,
                timeout=aiohttp.ClientTimeout(total=ADMIN_TIMEOUT_S),
            )
        return self._admin

    @staticmethod
    async def _check(response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            raise ServerAnswered(str(response.url), response.status, error_message(await response.read()))


class InferencePool:
    """All servers of the policy. They hold the same weights."""

    def __init__(self, config: ClientConfig, model: str) -> None:
        self.config = config
        self.model = model
        self.servers = [InferenceServer(url, config, model) for url in config.base_url]

    def least_loaded(self) -> InferenceServer:
        return min(self.servers, key=lambda server: server.groups_in_flight)

    async def wait_ready(self, use_token_client: bool) -> int:
        """Wait until every server is up, serves the model, and answers with what training needs.

        Returns:
            The newest policy version that a server holds: above 0 when an earlier run left its weights there.

        Raises:
            InferenceFault: a server does not come up, or cannot be used.
        """
        await asyncio.gather(*(self._wait_healthy(server) for server in self.servers))
        if not self.config.skip_model_check:
            await asyncio.gather(*(self._check_model(server) for server in self.servers))
        versions = await asyncio.gather(*(server.probe() for server in self.servers))
        if use_token_client:
            await self._use_tokens()
        return max(version or 0 for version in versions)

    async def update_weights(self, weight_dir: Path | None) -> None:
        await asyncio.gather(*(server.update_weights(weight_dir) for server in self.servers))

    async def watch(self) -> None:
        """Look at the servers every few seconds, for ever.

        Without this, a dead server shows only once all requests have used up their retries.

        Raises:
            InferenceFault: nothing listens at a server's address any more.
        """
        missed = dict.fromkeys(self.servers, 0)
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            for server in self.servers:
                missed[server] = missed[server] + 1 if await server.is_gone() else 0
                if missed[server] >= MISSED_WATCHES:
                    raise InferenceFault(f"the inference server {server.root_url} is gone; its log says why")

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self.servers))

    async def _wait_healthy(self, server: InferenceServer) -> None:
        started, poll_s, told = time.monotonic(), FIRST_POLL_S, False
        while not await server.is_ready():
            if time.monotonic() - started > READY_TIMEOUT_S:
                raise InferenceFault(
                    f"the inference server {server.root_url} is not ready after {READY_TIMEOUT_S:.0f} s"
                )
            if not told:
                get_logger().info(f"Waiting for the inference server {server.root_url}")
                told = True
            await asyncio.sleep(poll_s)
            poll_s = min(poll_s * 1.2, SLOWEST_POLL_S)

    async def _check_model(self, server: InferenceServer) -> None:
        try:
            models = await server.served_models()
        except (ServerAnswered, aiohttp.ClientError, KeyError) as error:
            raise InferenceFault(f"{server.base_url} does not list its models: {error}") from error
        if self.model not in models:
            raise InferenceFault(
                f"{server.base_url} does not serve {self.model!r} but {_listed(models)}: "
                "correct orchestrator.model.name, or set orchestrator.client.skip_model_check"
            )

    async def _use_tokens(self) -> None:
        routes = await asyncio.gather(*(server.has_token_route() for server in self.servers))
        if all(routes):
            for server in self.servers:
                server.use_tokens()
            return
        get_logger().warning(
            "An inference server has no /v1/chat/completions/tokens, so later turns travel as text; where that is "
            "tokenized otherwise than it was sampled, they become samples of their own"
        )


def _headers(config: ClientConfig) -> dict[str, str]:
    key = os.environ.get(config.api_key_var, "EMPTY")
    return config.headers if key in ("", "EMPTY") else {"Authorization": f"Bearer {key}", **config.headers}


def _listed(models: Sequence[Any]) -> str:
    return ", ".join(repr(model) for model in models) or "no model"
