"""Refuses requests without the server's key, in both engines."""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from prime_rl.inference.protocol import RequestError
from prime_rl.utils.engine_keys import is_bearer

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
        if scope["type"] == "lifespan" or scope["path"] in self.open_paths or self._is_authorized(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose(code=1008, reason="no valid key")(scope, receive, send)
        else:
            await _UNAUTHORIZED(scope, receive, send)

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
