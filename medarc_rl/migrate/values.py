"""Keys and values as TOML text, on one line."""

from __future__ import annotations

import re
from datetime import date, datetime, time
from typing import Any

from prime_rl.utils.tables import KeyPath

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
_LONGEST_SHOWN = 60


def value_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        pairs = ", ".join(f"{name_text(name)} = {value_text(item)}" for name, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    return _quoted(value) if isinstance(value, str) else repr(value)


def shown(value: Any) -> str:
    """`value_text`, shortened for a message."""
    text = value_text(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def key_text(path: KeyPath) -> str:
    """A dotted key as written in a file, without indices."""
    return ".".join(name_text(part) for part in path if isinstance(part, str))


def name_text(name: str) -> str:
    return name if _BARE.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    escaped = (_ESCAPES.get(char) or (char if char.isprintable() else _unicode_escape(char)) for char in text)
    return f'"{"".join(escaped)}"'


def _unicode_escape(char: str) -> str:
    return f"\\u{ord(char):04X}" if ord(char) <= 0xFFFF else f"\\U{ord(char):08X}"
