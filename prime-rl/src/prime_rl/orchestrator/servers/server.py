"""One inference server: is it ready, what does it serve, and which weights does it hold."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
import verifiers as vf

from prime_rl.configs.shared import ClientConfig
from prime_rl.orchestrator.errors import InferenceFault
from prime_rl.orchestrator.rollouts.chat_client import (
    ChatChannel,
    ChatClient,
    ServerAnswered,
    TokenChatClient,
)
from prime_rl.orchestrator.rollouts.replies import check_reply, error_message
from prime_rl.utils.logger import get_logger

ADMIN_TIMEOUT_S = 600.0
MAX_RETRIES = 6
"""Attempts after the first, about 20 s in all. A server that refuses connections ends the run before that."""
UPDATE_PAUSES_S = (1.0, 2.0)
"""Before another attempt at an update that found no connection."""
ADAPTER_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0)
"""Before another attempt at an adapter whose files the server does not see yet, as on a network filesystem."""
PROBE_MESSAGES = [{"role": "user", "content": "Hello"}]


class InferenceServer:
    """One server. `groups_in_flight` is the scheduler's account of its load."""

    def __init__(self, base_url: str, config: ClientConfig, model: str, adapter: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self.root_url = self.base_url.removesuffix("/v1")
        self.base_model = model
        self.adapter = adapter
        """Name of the adapter that updates load; None when they replace the weights of the model."""
        self.model = model
        """What rollouts ask for: the adapter from its first version on. Those that began before keep the model."""
        self.groups_in_flight = 0
        self.in_group = False
        """Whether weights come from the trainer, which sends them once."""
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
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
        """Whether nothing listens at the address any more, or the server says itself that it cannot serve.

        A busy server that is slow to answer is not gone.
        """
        try:
            async with self._session().get(f"{self.root_url}/health") as response:
                return response.status != 200
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
        body = {"model": self.base_model, "messages": PROBE_MESSAGES, "max_completion_tokens": 1, "logprobs": True}
        try:
            reply = await channel.post("/chat/completions", body={**body, "return_token_ids": True})
        except (ServerAnswered, aiohttp.ClientError, TimeoutError) as error:
            raise InferenceFault(f"{self.base_url} does not answer a chat request: {error}") from error
        finally:
            await channel.close()
        check_reply(reply, self.base_url)
        versions = reply.choices[0].weight_versions
        return versions[-1].version if versions else None

    async def update_weights(self, weight_dir: Path | None) -> None:
        """Load the weights or the adapter in `weight_dir`, or the base model's weights.

        Requests in flight go on: those that ask for what was replaced, with its new version.

        Raises:
            InferenceFault: the server refuses them, or does not answer.
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

    async def join_weight_group(self, host: str, port: int, place: tuple[int, int], timeout_s: int) -> None:
        """Meet the trainer at `host`:`port`, as server `place[0]` of `place[1]`.

        Raises:
            InferenceFault: the server cannot, or the trainer does not come.
        """
        body = {"host": host, "port": port, "server_rank": place[0], "num_inference_server": place[1]}
        # The server answers after `timeout_s` at the latest, with the reason.
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
        """Post an update; a few times where that may help."""
        for attempt in itertools.count():
            try:
                async with self._session().post(f"{self.root_url}{route}", json=body) as response:
                    await self._check(response)
                return
            except (ServerAnswered, aiohttp.ClientConnectionError) as error:
                pauses_s = () if self.in_group else _retry_pauses_s(route, error)
                if attempt >= len(pauses_s):
                    raise
                get_logger().warning(f"Trying again in {pauses_s[attempt]:.0f} s: {error}")
                await self.sleep(pauses_s[attempt])

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


def _retry_pauses_s(route: str, error: Exception) -> Sequence[float]:
    """The pauses before further attempts at an update that fails like this. 404 is an adapter that is not there yet."""
    if not isinstance(error, ServerAnswered):
        return UPDATE_PAUSES_S
    is_passing = route == "/load_lora_adapter" and (error.status == 404 or error.status >= 500)
    return ADAPTER_PAUSES_S if is_passing else ()


def _headers(config: ClientConfig) -> dict[str, str]:
    key = os.environ.get(config.api_key_var, "EMPTY")
    return config.headers if key in ("", "EMPTY") else {"Authorization": f"Bearer {key}", **config.headers}
