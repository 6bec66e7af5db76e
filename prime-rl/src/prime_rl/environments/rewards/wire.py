"""Length-prefixed msgpack frames, between reward pool and workers, and between games and their host.

Four bytes of length, then msgpack. Nothing is unpickled: the other side runs code of users and of games.
"""

from __future__ import annotations

import os
import select
import struct
import time
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import asyncio

MAX_FRAME_BYTES = 256 * 2**20
_LENGTH = struct.Struct("<I")


class Ended(Exception):
    """The other side closed its end, or sent something that is not a frame."""


def encode(message: dict[str, Any]) -> bytes:
    body = msgspec.msgpack.encode(message, enc_hook=_plain)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(body)} bytes; a worker accepts at most ({MAX_FRAME_BYTES})")
    return _LENGTH.pack(len(body)) + body


def _plain(value: Any) -> Any:
    """Replace an object that msgpack cannot encode."""
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def send(descriptor: int, frame: bytes) -> None:
    """Write a frame. Raises Ended if the other side is closed."""
    view = memoryview(frame)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except BrokenPipeError as error:
        raise Ended from error


def receive(descriptor: int, deadline: float | None = None) -> dict[str, Any]:
    """Read the next frame.

    Raises:
        Ended: the other side closed, or sent no frame.
        TimeoutError: the frame is not complete at `deadline` (`time.monotonic()`).
    """
    return _message(_exactly(descriptor, _size(_exactly(descriptor, _LENGTH.size, deadline)), deadline))


async def receive_from(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Read the next frame of a stream.

    Raises:
        Ended: the other side closed, or sent no frame.
    """
    try:
        return _message(await reader.readexactly(_size(await reader.readexactly(_LENGTH.size))))
    except EOFError as error:
        raise Ended from error


def _size(header: bytes) -> int:
    (size,) = _LENGTH.unpack(header)
    if size > MAX_FRAME_BYTES:
        raise Ended
    return int(size)


def _message(body: bytes) -> dict[str, Any]:
    try:
        message = msgspec.msgpack.decode(body)
    except msgspec.DecodeError as error:
        raise Ended from error
    if not isinstance(message, dict):
        raise Ended
    return message


def _exactly(descriptor: int, size: int, deadline: float | None) -> bytes:
    parts = bytearray()
    poll = select.poll()  # select takes descriptors below 1024 only, and a run may hold more connections
    poll.register(descriptor, select.POLLIN)
    while len(parts) < size:
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise TimeoutError
        if not (part := os.read(descriptor, min(size - len(parts), 2**20))):
            raise Ended
        parts += part
    return bytes(parts)
