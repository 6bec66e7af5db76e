"""The clients with which an environment asks the model: one for each rollout, with the key of its session.

They speak HTTP/1.1 to the proxy of the same machine over plain connections. httpx's own connections cost more than the
rest of a request: for each one, it looks at all connections of its pool.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

TIMEOUT_S = 7200.0
SESSION_HEADER = "X-Session-ID"
"""verifiers 0.3 and later send the id of a rollout's trace in it."""
NO_SESSION = "no-session"
"""The key of requests outside of a rollout. The proxy refuses it."""
MAX_HEAD_BYTES = 64 << 10


def session_name(key: str) -> str:
    """The name of the session with a key, which does not tell the key. Where requests cannot carry a key each, they
    carry this name in `SESSION_HEADER` and the proxy's own key."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


class Clients:
    """Clients of the proxy at `base_url`, which share their connections."""

    def __init__(self, base_url: str) -> None:
        from openai import AsyncOpenAI

        self._client = AsyncOpenAI(
            base_url=base_url, api_key=NO_SESSION, max_retries=2, timeout=TIMEOUT_S, http_client=http_client(base_url)
        )

    def of_session(self, key: str) -> Any:
        """An `openai.AsyncOpenAI` for one session."""
        return quick(self._client.copy(api_key=key))


def quick(client: Any) -> Any:
    """The same `openai.AsyncOpenAI`, which sends messages of text as they are.

    It would walk through every message once for each kind that a message can be, to rename keys: a tenth of the core of
    a process that runs environments. Messages with tools, images or objects of `openai` still go that way.
    """
    create = client.chat.completions.create

    async def send(**options: Any) -> Any:
        messages = options.get("messages")
        if "extra_body" not in options and isinstance(messages, list) and all(map(_is_text, messages)):
            options |= {"messages": [], "extra_body": {"messages": messages}}
        return await create(**options)

    client.chat.completions.create = send
    return client


def _is_text(message: object) -> bool:
    return isinstance(message, dict) and all(type(value) is str for value in message.values())


def for_verifiers(client: Any) -> Any:
    """The client in the form that the installed version of verifiers takes: since 0.1.11 it wraps OpenAI's."""
    try:
        from verifiers.clients import OpenAIChatCompletionsClient
    except ImportError:
        return client
    return OpenAIChatCompletionsClient(client)


def http_client(base_url: str) -> Any:
    """A client for `AsyncOpenAI(http_client=...)`, with the httpx that the installed `openai` uses.

    Requests to the host of `base_url` go through `Loopback`, others through httpx's own connections.
    """
    from openai import DefaultAsyncHttpxClient

    base = next(each for each in DefaultAsyncHttpxClient.__mro__ if each.__name__ == "AsyncClient")
    httpx = importlib.import_module(base.__module__.partition(".")[0])
    parts, transport = urlsplit(base_url), cast("Any", Loopback(httpx))
    mounts = {f"{parts.scheme}://{parts.netloc}": transport}
    return DefaultAsyncHttpxClient(mounts=mounts, timeout=None, trust_env=False)


class Loopback:
    """A transport of httpx that reads whole answers. It opens a connection for each request at a time, and keeps it."""

    def __init__(self, httpx: Any) -> None:
        self._httpx = httpx
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Loopback:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def handle_async_request(self, request: Any) -> Any:
        """The answer to a request.

        Raises:
            httpx.ConnectError: nobody listens.
            httpx.ReadTimeout: the request's time ran out.
            httpx.RemoteProtocolError: the connection ended, or the answer is no HTTP/1.1.
        """
        connection = await self._connection(request.url)
        limit_s = request.extensions.get("timeout", {}).get("read")
        try:
            status, headers, body = await connection.exchange(_encoded(request, await request.aread()), limit_s)
        except TimeoutError as error:
            raise self._httpx.ReadTimeout("the proxy did not answer in time", request=request) from error
        except (OSError, ValueError) as error:
            raise self._httpx.RemoteProtocolError(str(error), request=request) from error
        if connection.is_open:
            self._idle.append(connection)
        return self._httpx.Response(status, headers=headers, content=body, request=request)

    async def _connection(self, url: Any) -> _Connection:
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.loop is loop:
                return connection
            connection.close()
        try:
            _, connection = await loop.create_connection(lambda: _Connection(loop), url.host, url.port)
        except OSError as error:
            raise self._httpx.ConnectError(str(error)) from error
        return connection


class _Answer(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.is_open = False
        self._transport: Any = None
        self._received = bytearray()
        self._answer: asyncio.Future[_Answer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = transport, True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the proxy closed the connection before it answered"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._answer is None or self._answer.done():
            self.close()  # nothing was asked
            return
        try:
            answer = _parsed(self._received)
        except (ValueError, IndexError, KeyError) as error:
            self._answer.set_exception(ValueError(f"the proxy's answer is not HTTP/1.1: {error}"))
            return
        if answer is not None:
            self._received.clear()
            self._answer.set_result(answer)

    async def exchange(self, data: bytes, limit_s: float | None) -> _Answer:
        self._answer = self.loop.create_future()
        timer = None if limit_s is None else self.loop.call_later(limit_s, self._give_up)
        done = False
        try:
            self._transport.write(data)
            answer = await self._answer
            done = True
            return answer
        finally:
            if timer is not None:
                timer.cancel()
            self._answer = None
            if not done:  # an answer that comes later belongs to no request
                self.close()

    def close(self) -> None:
        self.is_open = False
        if not self.loop.is_closed():
            self._transport.abort()

    def _give_up(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(TimeoutError())


def _encoded(request: Any, body: bytes) -> bytes:
    lines = [request.method.encode() + b" " + request.url.raw_path + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in request.headers.raw]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _parsed(received: bytearray) -> _Answer | None:
    """Status, headers and body, or None while some of it is missing."""
    end = received.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    if end < 0:
        if len(received) >= MAX_HEAD_BYTES:
            raise ValueError("its head has no end")
        return None
    first, *lines = bytes(received[:end]).split(b"\r\n")
    headers = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    lower = {name.lower(): value for name, value in headers}
    start, status = end + 4, int(first.split(b" ")[1])
    if lower.get(b"transfer-encoding") == b"chunked":
        body = _joined(received, start)
        if body is None:
            return None
        # httpx would join the chunks again.
        return _Answer(status, [pair for pair in headers if pair[0].lower() != b"transfer-encoding"], body)
    length = int(lower.get(b"content-length", b"0"))
    return (
        _Answer(status, headers, bytes(received[start : start + length])) if len(received) >= start + length else None
    )


def _joined(received: bytearray, at: int) -> bytes | None:
    """The chunks from `at` on, or None while the last one is missing."""
    chunks: list[bytes] = []
    while (line := received.find(b"\r\n", at)) >= 0:
        size = int(bytes(received[at:line]).partition(b";")[0], 16)
        at = line + 2
        if len(received) < at + size + 2:
            return None
        if size == 0:
            return b"".join(chunks)
        chunks.append(bytes(received[at : at + size]))
        at += size + 2
    return None
