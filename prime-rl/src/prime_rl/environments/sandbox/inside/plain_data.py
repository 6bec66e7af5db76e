"""Frames of plain data between a program and its tests: four bytes of length, then JSON with type tags.

Only data arrives: whatever class a program defines, the tests compare Python's own types.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import json
import socket
import struct
import types
from collections.abc import Callable, Mapping
from typing import Any

MAX_FRAME_BYTES = 16 * 2**20
_LENGTH = struct.Struct("<I")


class Unsendable(Exception):
    """A value that is not plain data and may not become a reference."""


class Closed(Exception):
    """The other side is gone, or sent something that is not a frame."""


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    body = json.dumps(message).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise Unsendable(f"{len(body)} bytes are more than {MAX_FRAME_BYTES}")
    try:
        connection.sendall(_LENGTH.pack(len(body)) + body)
    except OSError as error:
        raise Closed(str(error)) from error


def receive(connection: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise Closed(f"a frame of {length} bytes")
    try:
        return json.loads(_exactly(connection, length))
    except (ValueError, RecursionError) as error:
        raise Closed("a frame that is not JSON") from error


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = connection.recv(min(size - len(parts), 2**16))
        except OSError as error:
            raise Closed(str(error)) from error
        if not part:
            raise Closed("the other side ended")
        parts += part
    return bytes(parts)


_COLLECTIONS: tuple[tuple[Any, str | None], ...] = (
    (list, None), (tuple, "tuple"), (set, "set"), (frozenset, "frozenset"), (collections.deque, "deque"),
)  # fmt: skip
_PLAIN: tuple[Any, ...] = (int, float, str)


def encode(value: Any, reference: Callable[[Any], Any]) -> Any:
    """Encode as JSON with type tags. `reference(value)` replaces an object of another class, or raises Unsendable."""
    if value is None or value is True or value is False:
        return value
    kind = type(value)
    if kind in (int, float, str):
        return value
    for base, tag in _COLLECTIONS:
        if isinstance(value, base):
            items = [encode(each, reference) for each in base.__iter__(value)]
            return items if tag is None else {tag: items}
    if isinstance(value, dict):
        return {"dict": [[encode(key, reference), encode(each, reference)] for key, each in dict.items(value)]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    for plain in _PLAIN:  # a subclass: only the inherited value
        if isinstance(value, plain):
            return plain.__add__(value, plain())
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (decimal.Decimal, fractions.Fraction)):
        return {type(value).__name__: str(value)}
    if kind in (datetime.datetime, datetime.date, datetime.time):
        return {kind.__name__: value.isoformat()}
    return reference(value)


def decode(value: Any, reference: Callable[[Any], Any]) -> Any:
    """Decode what `encode` wrote. `reference(number)` replaces an object of the other side."""
    if isinstance(value, list):
        return [decode(each, reference) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise Closed("a value with more than one tag")
    ((tag, content),) = value.items()
    try:
        return _DECODERS[tag](content, reference)
    except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise Closed(f"a malformed {tag!r}") from error


def _items(content: Any, reference: Callable[[Any], Any]) -> list[Any]:
    return [decode(each, reference) for each in content]


_DECODERS: Mapping[str, Callable[[Any, Callable[[Any], Any]], Any]] = types.MappingProxyType(
    {
        "tuple": lambda content, reference: tuple(_items(content, reference)),
        "set": lambda content, reference: set(_items(content, reference)),
        "frozenset": lambda content, reference: frozenset(_items(content, reference)),
        "deque": lambda content, reference: collections.deque(_items(content, reference)),
        "dict": lambda content, reference: {decode(key, reference): decode(each, reference) for key, each in content},
        "range": lambda content, _: range(*content),
        "bytes": lambda content, _: bytes.fromhex(content),
        "complex": lambda content, _: complex(*content),
        "Decimal": lambda content, _: decimal.Decimal(content),
        "Fraction": lambda content, _: fractions.Fraction(content),
        "datetime": lambda content, _: datetime.datetime.fromisoformat(content),
        "date": lambda content, _: datetime.date.fromisoformat(content),
        "time": lambda content, _: datetime.time.fromisoformat(content),
        "ref": lambda content, reference: reference(content),
    }
)
