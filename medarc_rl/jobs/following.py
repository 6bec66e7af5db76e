"""Reads a job's log file, and follows it until the job has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from medarc_rl.errors import MedarcError
from medarc_rl.jobs.log import Status

LOOK_EVERY_S = 0.5
ASK_EVERY = 6
"""Looks without a new line between two questions whether the job has ended."""
_CHUNK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20
"""A longer line is cut into several."""


def log_lines(log: Path, follow: bool, status: Callable[[], Status]) -> Iterator[str]:
    """The lines of a job's log file. Following ends when the job does.

    Raises:
        MedarcError: there is no such file, or it cannot be read.
    """
    if not follow and not log.is_file():
        found = status()
        raise MedarcError(f"{log}: no log yet: the job is {found.state}{f': {found.detail}' if found.detail else ''}")
    return follow_file(log, lambda: not follow or not status().goes_on)


def follow_file(
    path: Path, has_ended: Callable[[], bool], pause: Callable[[float], object] = time.sleep
) -> Iterator[str]:
    """The lines of a file. Once `has_ended` is true, the iteration ends with the lines that were written before.

    The file may not exist yet, and may be replaced by a new one or cut. Raises MedarcError if it cannot be read.
    """
    reader, quiet = _Reader(path), 0
    while True:
        if (lines := reader.read()) is not None:
            yield from lines
            quiet = 0
            continue
        if quiet % ASK_EVERY == 0 and has_ended():
            while (lines := reader.read()) is not None:
                yield from lines
            yield from reader.rest()
            return
        quiet += 1
        pause(LOOK_EVERY_S)


class _Reader:
    """Reads what is new in a file, a piece at a time: a log may be larger than the memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun = b""
        self._file: BinaryIO | None = None

    def read(self) -> list[str] | None:
        """The whole lines of the next piece; None if there is nothing new."""
        file = self._opened()
        chunk = b"" if file is None else file.read(_CHUNK_BYTES)
        if not chunk:
            return None
        *lines, self.begun = (self.begun + chunk).split(b"\n")
        if len(self.begun) > _LONGEST_LINE_BYTES:
            lines, self.begun = [*lines, self.begun], b""
        return [line.decode(errors="replace") for line in lines]

    def rest(self) -> list[str]:
        """The last line, if it has no end."""
        return [self.begun.decode(errors="replace")] if self.begun else []

    def _opened(self) -> BinaryIO | None:
        try:
            found = self.path.stat()
        except OSError:
            return self._file
        if self._file is not None:
            here = os.fstat(self._file.fileno())
            if (here.st_ino, here.st_dev) == (found.st_ino, found.st_dev) and found.st_size >= self._file.tell():
                return self._file
            self._file.close()
            self.begun = b""
        try:
            self._file = self.path.open("rb")
        except FileNotFoundError:
            self._file = None
        except OSError as error:
            raise MedarcError(f"{self.path}: {error.strerror}") from error
        return self._file
