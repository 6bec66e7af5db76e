"""Logs for people: `HH:MM:SS`, level, message; or one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO, TypeVar

StreamT = TypeVar("StreamT", bound=TextIO)

SUCCESS = 25
"""Between INFO and WARNING: a step or a run that ended well. Tests and scripts look for these lines."""

_COLOURS = {
    "DEBUG": "\033[2m",
    "SUCCESS": "\033[32m",
    "WARNING": "\033[33m",
    "ERROR": "\033[31m",
    "CRITICAL": "\033[31m",
}
_RESET = "\033[0m"


class TextFormatter(logging.Formatter):
    """`12:30:05    INFO message`; a debug line ends with its place in the source."""

    def __init__(self, colour: bool) -> None:
        super().__init__()
        self.colour = colour

    def format(self, record: logging.LogRecord) -> str:
        clock = self.formatTime(record, "%H:%M:%S")
        level = f"{record.levelname:>7}"
        if self.colour and record.levelname in _COLOURS:
            level = f"{_COLOURS[record.levelname]}{level}{_RESET}"
        line = f"{clock} {level} {record.getMessage()}"
        if record.levelno <= logging.DEBUG:
            line += f" [{record.filename}::{record.lineno}]"
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """`timestamp, level, message, module, function, line`, and `exception` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "message": record.getMessage(),
            "module": record.module,
            "function": record.funcName,
            "line": record.lineno,
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class _StreamHandler(logging.StreamHandler[StreamT]):
    """A log that cannot be written, on a full disk for one, is told of once on stderr; the program goes on.

    As much as the stream's buffer holds follows when there is room again.
    """

    _is_told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_told:
            self._is_told = True
            with contextlib.suppress(OSError):
                sys.stderr.write(f"warning: the log {self.stream.name} cannot be written: {error.strerror}\n")


class _FileHandler(_StreamHandler[TextIOWrapper], logging.FileHandler):
    pass


def setup_logger(level: str, log_file: Path | None = None, json_logging: bool = False) -> logging.Logger:
    """Send the records of `prime_rl` to stdout, and to `log_file` (appended to) when one is given.

    `level` is a level name in any case. A second call replaces the handlers of the first.
    """
    logging.addLevelName(SUCCESS, "SUCCESS")
    logger = logging.getLogger("prime_rl")
    logger.propagate = False
    logger.setLevel(level.upper())
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [_StreamHandler(sys.stdout)]
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(_FileHandler(log_file))
    for index, handler in enumerate(handlers):
        colour = index == 0 and sys.stdout.isatty()
        handler.setFormatter(JsonFormatter() if json_logging else TextFormatter(colour))
        logger.addHandler(handler)
    return logger


def get_logger() -> logging.Logger:
    """The engine's logger. `get_logger().log(SUCCESS, …)` writes a success line."""
    return logging.getLogger("prime_rl")
