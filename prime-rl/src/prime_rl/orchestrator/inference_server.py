"""One inference server: is it ready, what does it serve, and which weights does it hold."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

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

ADMIN_TIMEOUT_S = 600.0
MAX_RETRIES = 6
"""Attempts after the first, about 20 s in all. A server that refuses connections ends the run before that."""
UPDATE_ATTEMPTS = 3
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


def _headers(config: ClientConfig) -> dict[str, str]:
    key = os.environ.get(config.api_key_var, "EMPTY")
    return config.headers if key in ("", "EMPTY") else {"Authorization": f"Bearer {key}", **config.headers}
