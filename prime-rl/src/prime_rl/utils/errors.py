"""The errors of the engine's ground in three families, and one line of text for any error.

PrimeError               its message is enough: printed as `error: …`, one line for each fault, without a traceback
├── UserError            exit 2: the config, the directory or the machine does not allow it; nothing was started
│   ├── ConfigError      keys or values of a config
│   ├── StartFault       a file, package or program that a config names is missing, or cannot be used
│   ├── RowFileError     a data file cannot be read as rows
│   ├── DeviceError      GPUs, or the devices of several nodes, do not suffice
│   ├── RunDirError      a run's directory is in use, or lacks the checkpoint, weights or settings that are asked for
│   ├── StagingRefused   an input on S3 is missing or cannot be downloaded
│   └── NotPrivate       other users can enter a directory that should be this user's alone; also an OSError
└── RunError             exit 1: a valid request failed
    ├── CannotStart      a process of a launch did not start
    │   └── StoppedEarly     because a signal ended the launch first: exit 128 + its number
    └── StorageError     S3 refused a request, or did not answer

Any other exception is a mistake of ours, or of the user's own code: exit 1, with its traceback. trainer, orchestrator
and inference each have a module of errors of their own. A new class derives from one of the families, and exists only
if some `except` names it: otherwise raise the family itself.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

from prime_rl.utils.terminal import cut_inside

MAX_FAULTS = 100
"""Most faults that one ConfigError lists."""
MAX_LINE_CHARS = 2000


class PrimeError(Exception):
    """Something that the user can act on. Every fault is one line: where, what is wrong, what to do."""

    exit_code = 1

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


class StartFault(UserError):
    """A run cannot start with something that its config names. The message says what, the caller adds the key."""


class RowFileError(UserError):
    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))  # it may quote the data


class DeviceError(UserError):
    pass


class RunDirError(UserError):
    pass


class StagingRefused(UserError):
    def __init__(self, *faults: str, known_here: bool = True) -> None:
        super().__init__(*faults)
        self.known_here = known_here
        """False if S3 refused this machine, which may not be the one that runs the job."""


class CannotStart(RunError):
    pass


class StoppedEarly(CannotStart):
    def __init__(self, signum: signal.Signals, doing: str) -> None:
        super().__init__(f"stopped by {signum.name} while {doing}")
        self.exit_code = 128 + signum


class StorageError(RunError):
    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(one_line(message))
        self.code = code
        """S3's code of the error, or one of ours."""


class NotPrivate(UserError, OSError):
    pass


def one_line(error: BaseException | str, max_chars: int = MAX_LINE_CHARS) -> str:
    """An error or a text in one line of bounded length, without characters that act on a terminal.

    Our own errors are their message; others begin with their class: `KeyError: 'reward'`.
    """
    text = error if isinstance(error, str) else _text_of(error)
    # Cut before splitting: the text may be megabytes of data.
    shown = cut_inside(" ".join(cut_inside(text, 4 * max_chars).split()), max_chars)
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in shown)


def _text_of(error: BaseException) -> str:
    if isinstance(error, PrimeError):
        return "; ".join(error.faults)
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    return f"{type(error).__name__}: {error}"


def first_line(error: BaseException) -> str:
    """The first line of a library's error message, without the advice and the traces below it."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
