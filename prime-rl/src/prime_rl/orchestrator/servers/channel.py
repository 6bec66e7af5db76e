"""HTTP calls to an inference server: connections, limits and retries; replies decoded into the fields that we read."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from aiohttp.client_proto import ResponseHandler

from prime_rl.orchestrator.rollouts.replies import ChatReply, TokenizeReply, decode_chat_reply, error_message
from prime_rl.orchestrator.rollouts.sampling import EXACT_SEED
from prime_rl.orchestrator.servers.discovery import ServerNames
from prime_rl.run.process import own_beats, server_name
from prime_rl.utils.limits import allow_connections

KEEPALIVE_S = 4.0
"""Less than the 5 s after which uvicorn closes an idle connection, so that no request uses a closing one."""

MAX_CONNECTIONS = 8000
"""To one server; further calls wait here instead of in the server's queue. Our server has 8,192, and needs some for
health checks and updates. Linux gives out every second one of its 28,232 ports first: with more than 14,116 connections
to one address it searches thousands of ports for each new one, which takes 1.1 to 1.5 ms instead of 0.01."""
SHARES = 4
"""One server gets no more than this part of all connections. Where the system allows few, a server has few too, and
several processes may call it."""


class Connections:
    """The connector that all channels of an event loop share. It is open while at least one channel uses it."""

    def __init__(self, total: int, keepalive_s: float = KEEPALIVE_S) -> None:
        self.total = total
        self._keepalive_s = keepalive_s
        self._room = asyncio.Semaphore(total)
        self._connector: _Connector | None = None
        self._users = 0

    @classmethod
    def of_this_loop(cls) -> Connections:
        """The connections for all channels of the running event loop: as many as this process may open."""
        by_loop = _by_loop()
        for ended in [loop for loop in by_loop if loop.is_closed()]:
            del by_loop[ended]
        loop = asyncio.get_running_loop()
        if loop not in by_loop:
            by_loop[loop] = cls(allow_connections(SHARES * MAX_CONNECTIONS))
        return by_loop[loop]

    def limit_calls(self, most: int | None = None) -> CallLimit:
        """Limits the calls to one server: at most `most` at once, by default one server's share of all connections."""
        return CallLimit(asyncio.Semaphore(most or max(1, self.total // SHARES)), self._room)

    def enter(self) -> aiohttp.TCPConnector:
        """The connector, for one more channel. `leave` ends its use."""
        if self._connector is None:
            self._connector = _Connector(self.total, self._keepalive_s)
        self._users += 1
        return self._connector

    async def leave(self) -> None:
        self._users -= 1
        if not self._users and self._connector is not None:
            connector, self._connector = self._connector, None
            await connector.close()


@functools.cache
def _by_loop() -> dict[asyncio.AbstractEventLoop, Connections]:
    return {}


class CallLimit:
    """A call to a server enters this first. It waits until the server and this process may have one more connection.

    aiohttp can make calls wait too, but counts the wait as part of a call's time: a call would fail because others take
    long.
    """

    def __init__(self, to_server: asyncio.Semaphore, to_all: asyncio.Semaphore) -> None:
        self._to_server = to_server
        self._to_all = to_all

    async def __aenter__(self) -> None:
        await self._to_server.acquire()
        try:
            await self._to_all.acquire()
        except asyncio.CancelledError:
            self._to_server.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._to_all.release()
        self._to_server.release()


class _Connector(aiohttp.TCPConnector):
    """Closes idle connections to other servers before it opens one that would be too many.

    aiohttp's limit is on connections in use. Those that it keeps for later calls, to as many servers as there are, are
    open files too.
    """

    def __init__(self, total: int, keepalive_s: float) -> None:
        super().__init__(limit=0, keepalive_timeout=keepalive_s, resolver=ServerNames())
        self._total = total

    async def _create_connection(self, *args: Any) -> ResponseHandler:
        # The new connection is among those that are in use.
        while self._conns and len(self._acquired) + sum(map(len, self._conns.values())) > self._total:
            key = min(self._conns, key=lambda each: self._conns[each][0][1])
            idle, _ = self._conns[key].popleft()
            if not self._conns[key]:
                del self._conns[key]
            idle.close()
        # aiohttp closes others too, which were idle for too long. Their files are closed in the loop's next iteration.
        await asyncio.sleep(0)
        return await super()._create_connection(*args)


RETRYABLE_STATUS = frozenset({408, 429, 500, 502, 503, 504})


class ServerAnswered(Exception):
    """A server replied with an error status."""

    def __init__(self, url: str, status: int, message: str) -> None:
        super().__init__(f"{url} answered {status}: {message}")
        self.status = status
        self.message = message


class UnreadableAnswer(ServerAnswered):
    """A server replied with something else than the route returns: a gateway may answer with a page."""

    def __init__(self, url: str, message: str) -> None:
        super().__init__(url, 200, message)
        self.status = 502
        """A fault of the server, for those who decide by the status."""


class OverlongPrompt(ServerAnswered):
    """The prompt does not fit into the model's context."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of a reply, and the Unix times of request and reply."""

    body: bytes
    started_s: float
    ended_s: float


class ChatChannel:
    """Posts JSON to one server, with retries.

    On one core with an instant engine, 64 completion tokens and 128 calls in flight, a call through the `openai`
    package and `httpx` costs 5 to 7 ms, most of it for turning messages and token log-probabilities into objects and
    for scanning the connection pool. Through aiohttp, with replies decoded into a few fields, it costs about 1.2 ms.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], timeout_s: float, max_retries: int) -> None:
        self.base_url = base_url.rstrip("/")
        self.max_retries = max_retries
        self.max_connections: int | None = None
        """None: the share of one server in the connections of this process."""
        self.connections: Connections | None = None
        """None: from the first call on, those of the event loop."""
        self._limit: AbstractAsyncContextManager[None] = nullcontext()
        """Each call enters it."""
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._headers = {"Content-Type": "application/json", **headers}
        self._session: aiohttp.ClientSession | None = None
        self._encoder = msgspec.json.Encoder()
        self._tokenize_decoder = msgspec.json.Decoder(TokenizeReply)
        self._num_samples = 0

    async def post(self, path: str, body: dict[str, Any]) -> ChatReply:
        """The chat completion that a body asks for. Raises what `exchange` and `completion_of` raise."""
        return self.completion_of(path, await self.exchange(path, body), body.get("tokens"))

    async def tokenize(self, body: dict[str, Any]) -> list[int]:
        """The token ids of a rendered conversation. The route is beside `/v1`, not below it.

        Raises what `exchange` raises.
        """
        answer = await self.exchange("/tokenize", body, self.base_url.removesuffix("/v1"))
        with self._named("/tokenize", answer):
            return self._tokenize_decoder.decode(answer.body).tokens

    async def exchange(self, path: str, body: dict[str, Any], base_url: str | None = None) -> Answer:
        """Post a body and return the reply as it is.

        Raises:
            ServerAnswered: the reply has an error status, after retries if it is a retryable one.
            OverlongPrompt: the prompt does not fit into the model's context.
            aiohttp.ClientError: no reply, after retries.
        """
        data = self._encoder.encode(self._prepare(body))
        started_s = time.time()
        self._open()
        with own_beats().calling(server_name(self.base_url)):
            async with self._limit:
                answer = await self._post_with_retries(f"{base_url or self.base_url}{path}", data)
        return Answer(answer, started_s, ended_s=time.time())

    def completion_of(self, path: str, answer: Answer, prompt_ids: list[int] | None = None) -> ChatReply:
        """Decode a reply as a chat completion. `prompt_ids` are the tokens that were sent as its prompt.

        Raises UnreadableAnswer if it is not one.
        """
        with self._named(path, answer):
            reply = decode_chat_reply(answer.body, answer.started_s, answer.ended_s)
        if prompt_ids is not None and reply.prompt_token_ids == prompt_ids:
            # Its numbers are those of the earlier turns. The reply's, of 28 bytes each, would be kept for every turn.
            reply.prompt_token_ids = prompt_ids
        return reply

    @contextmanager
    def _named(self, path: str, answer: Answer) -> Iterator[None]:
        """Say which server gave a reply that cannot be read, and what it said."""
        try:
            yield
        except msgspec.DecodeError as error:
            message = f"not a valid reply of {path} ({error}): {error_message(answer.body)}"
            raise UnreadableAnswer(f"{self.base_url}{path}", message) from error

    async def close(self) -> None:
        if self._session is not None and self.connections is not None and not self._session.closed:
            await self._session.close()
            await self.connections.leave()
            # aiohttp closes its transports in the next iteration of the event loop.
            await asyncio.sleep(0)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self.connections = self.connections or Connections.of_this_loop()
            self._limit = self.connections.limit_calls(self.max_connections)
            self._session = aiohttp.ClientSession(
                connector=self.connections.enter(),
                connector_owner=False,
                timeout=self._timeout,
                headers=self._headers,
            )
        return self._session

    def _prepare(self, body: dict[str, Any]) -> dict[str, Any]:
        body = {name: value for name, value in body.items() if value is not None}
        if not body.pop(EXACT_SEED, False) and "seed" in body:
            # With one seed for all, the rollouts of a group would be identical and have no advantage.
            body["seed"] += self._num_samples
            # The server samples answer i of a request with seed + i.
            self._num_samples += body.get("n") or 1
        if "messages" in body:
            body["messages"] = [
                {name: value for name, value in message.items() if value is not None or name == "content"}
                for message in body["messages"]
            ]
        return body

    async def _post_with_retries(self, url: str, data: bytes) -> bytes:
        for attempt in itertools.count(1):
            try:
                return await self._post_once(url, data)
            except ServerAnswered as answer:
                if answer.status not in RETRYABLE_STATUS or attempt > self.max_retries:
                    raise
            except aiohttp.ClientConnectionError:
                if attempt > self.max_retries:
                    raise
            await self.sleep(min(0.25 * 2**attempt, 8.0))
        raise AssertionError("unreachable: the loop above has no end")

    async def _post_once(self, url: str, data: bytes) -> bytes:
        async with self._open().post(url, data=data) as response:
            answer = await response.read()
            if response.status == 200:
                return answer
            message = error_message(answer)
            if response.status == 400 and _is_overlong(message):
                raise OverlongPrompt(url, response.status, message)
            raise ServerAnswered(url, response.status, message)


def _is_overlong(message: str) -> bool:
    text = message.lower()
    return any(
        phrase in text for phrase in ("context length", "maximum model length", "prompt_too_long", "max_model_len")
    )
