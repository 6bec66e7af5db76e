"""Defines the error and the warning that users see."""

from __future__ import annotations

from collections.abc import Iterable

MAX_FAULTS = 100
"""Most faults to tell at once."""
_MAX_CHARS = 2000


def one_line(text: str) -> str:
    """A text of at most some 2000 characters, without line breaks or characters that act on a terminal."""
    words = " ".join(text[: 2 * _MAX_CHARS].split())
    shown = words if len(words) <= _MAX_CHARS and len(text) <= 2 * _MAX_CHARS else f"{words[:_MAX_CHARS]}..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in shown)


class ConfigError(ValueError):
    """The config has faults. Each is one line: where, which key, what is wrong, what to do."""

    def __init__(self, faults: Iterable[str]) -> None:
        lines = [one_line(fault) for fault in faults]
        more = [f"and {len(lines) - MAX_FAULTS} more faults"] if len(lines) > MAX_FAULTS else []
        self.faults = lines[:MAX_FAULTS] + more
        super().__init__("\n".join(self.faults))


class ConfigWarning(UserWarning):
    """A setting that works, but not as its author may think."""
