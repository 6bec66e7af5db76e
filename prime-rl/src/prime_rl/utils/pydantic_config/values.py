"""Parses values written as text, on a command line or in an environment variable, and checks the data of any source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

from prime_rl.utils.pydantic_config.schema import is_nullable, is_table, list_items, sections_among

# The data of a source, before anything walks it: its depth, its texts and its numbers.


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
            return f"{_shown(place)}: more than {MAX_DEPTH} levels of nested tables and lists"
        if isinstance(value, str) and (fault := text_fault(value)):
            return f"{_shown(place)}: {fault}" if place else fault
        if isinstance(value, int) and not -MAX_INT64 - 1 <= value <= MAX_INT64:
            return (
                f"{_shown(place)}: an integer that does not fit into 64 bits"
                if place
                else "an integer that does not fit into 64 bits"
            )
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


NULLS = ("null", "None")


class BadText(ValueError):
    """The text is not a value of its key."""


def parse_text(text: str, kinds: tuple[Any, ...]) -> Any:
    """Parse the value of a key of these kinds. Numbers and booleans stay text; validation converts them.

    Raises:
        BadText: the text of a section, list or table is malformed.
    """
    if fault := text_fault(text):
        raise BadText(f"{text!r} {fault}")
    if text in NULLS and is_nullable(kinds):
        return None
    if sections_among(kinds):
        return _json_object(text, "set its keys one by one, or give a JSON object")
    if (items := list_items(kinds)) is not None:
        return _list(text, bool(sections_among(items)))
    if is_table(kinds) and (text.lstrip().startswith("{") or str not in kinds):
        return _table(text, of_text=any(get_args(kind)[1:] == (str,) for kind in kinds))
    return text


def _json_object(text: str, advice: str) -> dict[str, Any]:
    try:
        value = _parse_json(text)
    except json.JSONDecodeError as error:
        raise BadText(f"{text!r} is not JSON ({error.msg} at column {error.colno}): {advice}") from error
    if not isinstance(value, dict):
        raise BadText(f"{text!r} is not a JSON object: {advice}")
    return value


def _parse_json(text: str) -> Any:
    """Parse JSON. Raises JSONDecodeError, and BadText for JSON that no config can hold."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise BadText(f"{text[:20]!r}...: objects or lists are nested too deeply") from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise BadText(f"{text[:20]!r}...: an integer with too many digits") from error
    if fault := data_fault(value):
        raise BadText(f"{text[:20]!r}...: {fault}")
    return value


def _list(text: str, of_sections: bool) -> list[Any]:
    text = text.strip()
    if text.startswith("["):
        try:
            items: list[Any] = _parse_json(text)
            return items
        except json.JSONDecodeError as error:
            if of_sections or not text.endswith("]"):
                raise BadText(f"{text!r} is not JSON ({error.msg} at column {error.colno})") from error
            text = text[1:-1]
    if of_sections:
        return [_json_object(text, "give one JSON object per item, or a JSON array of objects")]
    return [item.strip() for item in text.split(",") if item.strip()]


def _table(text: str, of_text: bool) -> dict[str, Any]:
    if text.lstrip().startswith("{"):
        return _json_object(text, "give a JSON object, or key=value,key=value")
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if not all(separator and key.strip() for key, separator, _ in pairs):
        raise BadText(f"{text!r} is neither a JSON object nor key=value,key=value")
    return {key.strip(): value.strip() if of_text else _plain(value.strip()) for key, _, value in pairs}


def _plain(text: str) -> Any:
    """Parse a number, a boolean or null. Anything else is text."""
    try:
        value = _parse_json(text)
    except json.JSONDecodeError:
        return text
    return text if isinstance(value, dict | list) else value
