"""ASGI middleware of both engines: requires the server's key, and bounds the size and the time of request bodies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from http import HTTPStatus

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from prime_rl.inference.protocol import BODY_TIMEOUT_S, MAX_BODIES_BYTES, MAX_BODY_BYTES, RequestError
from prime_rl.utils.engine_keys import is_bearer
from prime_rl.utils.http_server import marks_fault

_SMALL_BYTES = 1 << 16
HEALTH = "/health"
METRICS = "/metrics"


class RequireKey:
    """ASGI middleware: every route but the open ones needs `Authorization: Bearer KEY`, also those that only read.

    Otherwise any user of the machine could generate, load other weights, or pause the engine of a run.
    """

    def __init__(self, app: ASGIApp, key: str, open_paths: Collection[str] = (HEALTH,)) -> None:
        self.app = app
        self.open_paths = open_paths
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_open(scope) or self._is_authorized(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose(code=1008, reason="no valid key")(scope, receive, send)
        else:
            await _UNAUTHORIZED(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        """A stranger's body would take memory and the room of others: open routes are asked without one."""
        headers = dict(scope["headers"])
        has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0") != b""
        return scope["path"] in self.open_paths and not has_body

    def _is_authorized(self, scope: Scope) -> bool:
        value = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return is_bearer(value.decode("latin-1"), self._key)


_FAULT = RequestError(
    "This server needs its key: send the header Authorization: Bearer KEY. Clients of PRIME-RL read KEY from the "
    "variable VLLM_API_KEY",
    HTTPStatus.UNAUTHORIZED,
)
# Closes the connection, because the body of a stranger is not read.
_HEADERS = {"WWW-Authenticate": "Bearer", "Connection": "close"}
_UNAUTHORIZED = JSONResponse(_FAULT.body(), HTTPStatus.UNAUTHORIZED, _HEADERS)


class BoundBodies:
    """ASGI middleware: receives the whole body before the app runs, and refuses a body that is too large or too slow.

    A body that announces its size is refused (413) before any of it is read; others once they exceed the limit.
    Bodies that would have more than `most_bytes` together wait before they are read, at most `timeout_s` (503).
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int = MAX_BODY_BYTES,
        timeout_s: float = BODY_TIMEOUT_S,
        most_bytes: int = MAX_BODIES_BYTES,
    ) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s
        self.most_bytes = most_bytes
        self._arriving_bytes = 0
        self._changed = asyncio.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            body = await self._body(scope, receive)
        except RequestError as exc:
            # Closes the connection, because the rest of the body would have to be read before another request.
            refusal = JSONResponse(exc.body(), exc.status, {"Connection": "close"})
            await refusal(scope, receive, send)
            return
        if body is not None:
            await self.app(scope, _body_first(body, receive), send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None if the client has disconnected.

        Raises:
            RequestError: status 413 if the body is too large, 408 if it does not arrive in time, 503 if too many others
                arrive, 400 if it would take seconds to parse.
        """
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if len(length.lstrip(b"0")) > len(str(self.max_bytes)) or int(length) > self.max_bytes:
            raise self._too_large()
        is_announced = not any(name == b"transfer-encoding" for name, _ in scope["headers"])
        async with self._room(int(length) if is_announced else self.max_bytes):
            return await self._received(receive)

    @asynccontextmanager
    async def _room(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait until a body may arrive. Small ones do not: weights must be updated whatever else arrives.

        Raises:
            RequestError: status 503 if that takes too long.
        """
        num_bytes = num_bytes if num_bytes > _SMALL_BYTES else 0
        try:
            async with asyncio.timeout(self.timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._arriving_bytes + num_bytes <= self.most_bytes)
                self._arriving_bytes += num_bytes
        except TimeoutError as exc:
            message = f"Other bodies of {self._arriving_bytes} bytes are arriving: ask again later"
            raise RequestError(message, HTTPStatus.SERVICE_UNAVAILABLE) from exc
        try:
            yield
        finally:
            self._arriving_bytes -= num_bytes
            async with self._changed:
                self._changed.notify_all()

    async def _received(self, receive: Receive) -> bytes | None:
        body = bytearray()
        try:
            async with asyncio.timeout(self.timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self.max_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        break
        except TimeoutError as exc:
            received = f"{len(body)} bytes of the body arrived within {self.timeout_s:g} s"
            raise RequestError(f"{received}, and not the rest", HTTPStatus.REQUEST_TIMEOUT) from exc
        if (fault := marks_fault(body)) is not None:
            raise RequestError(fault[0].upper() + fault[1:])
        return bytes(body)

    def _too_large(self) -> RequestError:
        message = f"The body is larger than {self.max_bytes} bytes, the limit of this server"
        return RequestError(message, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


def _body_first(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body as one message, and then what the connection brings."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_next() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_next
