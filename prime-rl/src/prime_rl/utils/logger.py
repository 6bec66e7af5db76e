"""Logging: lines with `HH:MM:SS`, level and message, or one JSON object per line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO, TypeVar

from prime_rl.utils.terminal import plain, stream_behind

ATTEMPT_VARIABLE = "RUN_ATTEMPT"
"""Environment variable of a launch's processes: the number of the attempt."""

PROCESS_VARIABLE = "RUN_PROCESS"
"""Environment variable of a launch's processes: the name of the process, which JSON lines carry."""

StreamT = TypeVar("StreamT", bound=TextIO)

SUCCESS = 25
"""Level between INFO and WARNING, for steps and runs that succeeded. Tests and scripts search for these lines."""

_COLOURS = {
    "DEBUG": "\033[2m",
    "SUCCESS": "\033[32m",
    "WARNING": "\033[33m",
    "ERROR": "\033[31m",
    "CRITICAL": "\033[31m",
}
_RESET = "\033[0m"


class TextFormatter(logging.Formatter):
    """Formats `12:30:05    INFO message`; debug lines end with file name and line number."""

    def __init__(self, colour: bool) -> None:
        super().__init__()
        self.colour = colour

    def format(self, record: logging.LogRecord) -> str:
        clock = self.formatTime(record, "%H:%M:%S")
        level = f"{record.levelname:>7}"
        if self.colour and record.levelname in _COLOURS:
            level = f"{_COLOURS[record.levelname]}{level}{_RESET}"
        line = f"{clock} {level} {plain(record.getMessage())}"
        if record.levelno <= logging.DEBUG:
            line += f" [{record.filename}::{record.lineno}]"
        return line if not record.exc_info else f"{line}\n{plain(self.formatException(record.exc_info))}"


class JsonFormatter(logging.Formatter):
    """Formats a JSON object with `timestamp`, `level`, `process`, `message`, where it was logged, and `exception` if
    there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.process = os.environ.get(PROCESS_VARIABLE) or Path(sys.argv[0]).stem

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "process": self.process,
            "message": record.getMessage(),
            "module": record.module,
            "function": record.funcName,
            "line": record.lineno,
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def readable(line: str) -> str:
    """A line of a log as text for a terminal: JSON lines become what the other format would have written.

    Colours are dropped, and other control characters are spelled out. Of a line that rewrites itself, such as a
    progress bar, the last version stays.
    """
    return plain(_text_of(line)).replace("\r", "\\r")


def _text_of(line: str) -> str:
    if not line.startswith("{"):
        return line.rpartition("\r")[2]
    try:
        entry = json.loads(line)
        clock = datetime.fromisoformat(entry["timestamp"]).astimezone().strftime("%H:%M:%S")
        text = f"{clock} {entry['level']:>7} {entry['message']}"
        return f"{text}\n{entry['exception']}" if "exception" in entry else text
    except (ValueError, TypeError, KeyError, RecursionError):  # another program's line, or one that was cut off
        return line


class _StreamHandler(logging.StreamHandler[StreamT]):
    """If the log cannot be written (for example, the disk is full), prints one warning to stderr and continues.

    Lines in the stream's buffer are written once there is space again.
    """

    _has_warned = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_warned:
            self._has_warned = True
            with contextlib.suppress(OSError):
                sys.stderr.write(f"warning: cannot write to the log {self.stream.name}: {error.strerror}\n")


class _FileHandler(_StreamHandler[TextIOWrapper], logging.FileHandler):
    pass


class _HubRetries(logging.Filter):
    """Tells once that the hub is not reachable. Its library tells each of a dozen tries, past our log."""

    _failed = re.compile(r"(?P<why>.*) thrown while requesting \w+ \w+://(?P<host>[^/:]+)", re.DOTALL)
    _has_told = False

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        failed = self._failed.match(text)
        if failed is not None and not self._has_told:
            self._has_told = True
            why = failed["why"].strip("'")
            get_logger().warning(f"{failed['host']} is not reachable ({why}): trying again")
        return failed is None and not text.startswith("Retrying in ")


def setup_logger(level: str, log_file: Path | None = None, json_logging: bool = False) -> logging.Logger:
    """Send log records of `prime_rl` to stdout and, if given, append them to `log_file`.

    `level` is a level name in upper or lower case. A second call replaces the handlers of the first. A file that cannot
    be written is one warning on stderr. What the hub's library says of its retries becomes one line of ours.
    """
    logging.addLevelName(SUCCESS, "SUCCESS")
    logger = logging.getLogger("prime_rl")
    logger.propagate = False
    logger.setLevel(level.upper())
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [_StreamHandler(stream_behind(sys.stdout))]
    if log_file is not None:
        try:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(_FileHandler(log_file))
        except OSError as error:
            sys.stderr.write(f"warning: cannot write to the log {log_file}: {error.strerror}\n")
    for index, handler in enumerate(handlers):
        colour = index == 0 and sys.stdout.isatty()
        handler.setFormatter(JsonFormatter() if json_logging else TextFormatter(colour))
        logger.addHandler(handler)
    hub = logging.getLogger("huggingface_hub.utils._http")
    hub.filters = [each for each in hub.filters if not isinstance(each, _HubRetries)] + [_HubRetries()]
    attempt = os.environ.get(ATTEMPT_VARIABLE)
    for handler in handlers[1:] if attempt is not None else ():  # the launcher begins the log of stdout
        handler.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, f"Attempt {attempt}", (), None))
    return logger


def count_of(thing: str, count: int, ending: str = "s") -> str:
    """`1 thread`, `2 threads`; `ending` makes the plural."""
    return f"{count:,} {thing}{ending * (count != 1)}"


def get_logger() -> logging.Logger:
    """Return the logger of `prime_rl`. `get_logger().log(SUCCESS, …)` writes a success line."""
    return logging.getLogger("prime_rl")
