"""Checks the data of a source before anything walks it: its depth, its texts and its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 64
"""Tables and lists in each other. Everything that walks a config recurses as deep."""
MAX_KEYS = 10_000
"""Keys of all tables of one source. Each may get a fault of its own, with a hint that takes milliseconds."""
MAX_INT64 = 2**63 - 1
_SHOWN_CHARS = 60


def data_fault(data: Any) -> str | None:
    """What makes raw data unusable: where, and why. None for good data. `data` may be nested to any depth."""
    waiting: list[tuple[str, int, Any]] = [("", 0, data)]
    num_keys = 0
    while waiting:
        place, depth, value = waiting.pop()
        if depth > MAX_DEPTH:
            return f"{_shown(place)}: more than {MAX_DEPTH} tables and lists in each other"
        if isinstance(value, str) and (fault := text_fault(value)):
            return f"{_shown(place)}: {fault}" if place else fault
        if isinstance(value, int) and not -MAX_INT64 - 1 <= value <= MAX_INT64:
            return f"{_shown(place)}: an integer of more than 64 bits" if place else "an integer of more than 64 bits"
        num_keys += len(value) if isinstance(value, dict) else 0
        if num_keys > MAX_KEYS:
            return f"more than {MAX_KEYS} keys, too many for a config"
        for key, item in _items(value):
            if isinstance(key, str) and (fault := text_fault(key)):
                return f"{_shown(place) or 'a key'}: the key {_shown(key)!r} {fault}"
            waiting.append((f"{place}.{key}" if place else str(key), depth + 1, item))
    return None


def text_fault(text: str) -> str | None:
    """Why a text cannot be written to a file or handed to a program."""
    if "\0" in text:
        return "holds a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not UTF-8"
    return None


def _items(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
