"""HTTP servers on the loopback interface: where they listen, bounds on bodies, and few lines on malformed requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prime_rl.utils.errors import one_line
from prime_rl.utils.logger import get_logger

if TYPE_CHECKING:
    from aiohttp import web

HOST = "127.0.0.1"
CLOSE_S = 1.0
"""Seconds that open requests get when a server closes."""
MAX_MARKS = 500_000
"""Opening brackets and quotation marks in a body. They bound the objects, lists and strings that parsing it makes."""
MAX_MESSAGES = 4096
"""Messages of a conversation, and items of the responses API."""
QUIET_S = 60.0
"""Seconds between two lines on malformed requests: whoever reaches a port can send one every millisecond."""

_MARKS = (b"[", b"{", b'"')
_MAX_SHOWN_CHARS = 200


class BadBody(Exception):
    """The body of a request cannot be used. It becomes status 400 on servers that `listening` starts."""


def marks_fault(body: bytes | bytearray) -> str | None:
    """Tell if a body would take seconds to parse, at a hundredth of the cost of parsing it."""
    marks = sum(map(body.count, _MARKS))
    if marks <= MAX_MARKS:
        return None
    return f"the body has {marks} opening brackets and quotation marks; at most {MAX_MARKS} are allowed"


async def json_object(request: web.Request) -> dict[str, Any]:
    """The JSON object in a request's body. An empty body is an empty object.

    Raises:
        BadBody: it is something else, or too much to parse.
    """
    import msgspec
    from aiohttp import web

    try:
        raw = await request.read()
    except web.RequestPayloadError as error:
        raise BadBody(f"the body cannot be read: {one_line(str(error))}") from error
    if (fault := marks_fault(raw)) is not None:
        raise BadBody(fault)
    try:
        # Stricter than `json`: what it takes can be sent on.
        body = msgspec.json.decode(raw or b"{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadBody(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadBody("the body must be a JSON object")
    return body


def entries_fault(value: list[Any], name: str) -> str | None:
    """Tell if a body has more messages or items in the list `name` than a conversation can have."""
    return f"{name}: {len(value)} entries; at most {MAX_MESSAGES} are allowed" if len(value) > MAX_MESSAGES else None


async def listening(app: web.Application, name: str, port: int = 0) -> web.AppRunner:
    """Serve `app` on a port of the loopback interface: a free one, unless `port` names it. `name`: for the log.

    Raises:
        OSError: the port is taken.
    """
    from aiohttp import web

    app.middlewares.append(_refusing_bad_bodies())
    # A client that is gone must not keep an engine busy.
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_S, logger=quiet_logger(name)
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner


def error_answer(status: int, message: str, code: str | None = None) -> web.Response:
    """An error as OpenAI's API writes it."""
    from aiohttp import web

    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "code": code}}, status=status)


def _refusing_bad_bodies() -> Any:
    from aiohttp import web

    @web.middleware
    async def refusing(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            response: web.StreamResponse = await handler(request)
            return response
        except BadBody as error:
            return error_answer(400, str(error))

    return refusing


def quiet_logger(name: str) -> logging.Logger:
    """A logger for an HTTP server: logs our own faults with a traceback, those of clients as one line a minute."""
    logger = logging.Logger(name, logging.WARNING)
    logger.addHandler(_Quiet(name))
    return logger


class _Quiet(logging.Handler):
    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._server = name
        self._clock = clock
        self._next_s = 0.0
        self._untold = 0

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not _is_of_client(error):
            get_logger().error(f"{self._server}: {record.getMessage()}", exc_info=error)
            return
        now_s = self._clock()
        if now_s < self._next_s:
            self._untold += 1
            return
        what = one_line(record.getMessage() if error is None else f"{record.getMessage()}: {error}")
        more = f" (and {self._untold} more since the last line)" if self._untold else ""
        get_logger().warning(f"{self._server}: a malformed request was refused: {what[:_MAX_SHOWN_CHARS]}{more}")
        self._next_s, self._untold = now_s + QUIET_S, 0


def _is_of_client(error: BaseException) -> bool:
    """Whether a client caused an error: it does not speak HTTP, or it is gone."""
    from aiohttp import http_exceptions, web

    return isinstance(error, http_exceptions.HttpProcessingError | web.RequestPayloadError | ConnectionError)
