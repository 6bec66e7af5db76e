"""The engine's errors in three families, and one line of text for any error.

PrimeError               its message is enough: printed as `error: …`, one line for each fault, without a traceback
├── UserError            exit 2: the config, the directory or the machine does not allow it; nothing was started
│   └── ConfigError      keys or values of a config
└── RunError             exit 1: a valid request failed

Any other exception is a mistake of ours, or of the user's own code: exit 1, with its traceback. trainer, orchestrator
and inference have a module of errors each. A new class derives from one of the families, and exists only if some
`except` names it: otherwise raise the family itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

MAX_FAULTS = 100
"""Most faults that one ConfigError lists."""
MAX_LINE_CHARS = 2000


class PrimeError(Exception):
    """Something that the user can act on. Every fault is one line: where, what is wrong, what to do."""

    exit_code: ClassVar[int] = 1

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults: tuple[str, ...] = faults


class UserError(PrimeError):
    """The request is not possible as it stands."""

    exit_code = 2


class RunError(PrimeError):
    """The request was valid, and failed."""


class ConfigError(UserError, ValueError):
    """A config has faults. It is a ValueError so that Pydantic's validators may raise it."""

    def __init__(self, faults: Iterable[str]) -> None:
        lines = [one_line(fault) for fault in faults]
        more = [f"and {len(lines) - MAX_FAULTS} more faults"] if len(lines) > MAX_FAULTS else []
        super().__init__(*lines[:MAX_FAULTS], *more)


class ConfigWarning(UserWarning):
    """A setting that works, but not as its author may think."""


def one_line(error: BaseException | str, max_chars: int = MAX_LINE_CHARS) -> str:
    """An error or a text in one line of bounded length, without characters that act on a terminal.

    Our own errors are their message; others begin with their class: `KeyError: 'reward'`.
    """
    text = error if isinstance(error, str) else _told(error)
    # Cut before splitting: the text may be megabytes of data.
    words = " ".join(text[: 2 * max_chars].split())
    shown = words if len(words) <= max_chars and len(text) <= 2 * max_chars else f"{words[:max_chars]}..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in shown)


def _told(error: BaseException) -> str:
    if isinstance(error, PrimeError):
        return "; ".join(error.faults)
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    return f"{type(error).__name__}: {error}"


def first_line(error: BaseException) -> str:
    """The first line of a library's error message, without the advice and the traces below it."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
