"""Messages between the orchestrator and an environment: JSON, with a length in 4 bytes before it on a stream.

A request is `{"id", "do", "with"}`, with the name of a method and its arguments, or `{"do": "cancel", "of": id}`. An
answer is `{"id", "value", "loop"}`, or `{"id", "error", "kind"}` with the class of the error. `loop` is what
`LoopWatch.take` says of the event loop since the last answer.

On a socket pair nobody else can connect. A server at an address gets the same messages over ZeroMQ, which has frames
and checks the key of its peer.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
from typing import Any

PROTOCOL = 3
"""Raised whenever a message changes its meaning."""
MAX_FRAME_BYTES = 256 << 20
"""A longer message ends the connection."""
_LENGTH = struct.Struct("!I")


class BadFrame(Exception):
    """What arrived is no message."""


def dump(message: dict[str, Any]) -> bytes:
    """A message without its length. Values that JSON lacks become their texts, or plain values that they stand for."""
    return json.dumps(message, default=_plain).encode()


def encode(message: dict[str, Any]) -> bytes:
    """A message with its length, for a stream."""
    body = dump(message)
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrame(f"a message of {len(body):,} bytes; at most {MAX_FRAME_BYTES:,} can be sent")
    return _LENGTH.pack(len(body)) + body


def _plain(value: Any) -> Any:
    for name in ("model_dump", "tolist", "item"):
        convert = getattr(value, name, None)
        if callable(convert):
            return convert()
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    return str(value)


def decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"a message that is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise BadFrame("a message that is not a JSON object")
    return message


def _length(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise BadFrame(f"a message of {length:,} bytes; at most {MAX_FRAME_BYTES:,} are read")
    return int(length)


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message; None at the end of the connection. Raises BadFrame."""
    try:
        head = await reader.readexactly(_LENGTH.size)
        return decode(await reader.readexactly(_length(head)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive_now(connection: socket.socket) -> dict[str, Any] | None:
    """The next message of a blocking socket; None at the end of the connection. Raises BadFrame."""
    head = _exactly(connection, _LENGTH.size)
    body = None if head is None else _exactly(connection, _length(head))
    return None if body is None else decode(body)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(min(count - len(parts), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


def finite(value: Any) -> float | None:
    """A number as a float; None for anything else, also for infinities."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
