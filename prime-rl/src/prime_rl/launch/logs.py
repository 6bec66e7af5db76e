"""Log files of a launch and its children: each attempt is appended; they can be read while they grow."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from prime_rl.launch.spec import ProcessSpec
from prime_rl.utils.files import naming
from prime_rl.utils.logger import readable
from prime_rl.utils.terminal import cut_inside

HEAD = "===="
"""Start of the line that begins an attempt."""

_ERROR = re.compile(r"(?:\d{2}:\d{2}:\d{2}\s+(?:ERROR|CRITICAL)\s+|error: )(\S.*)")
_EXCEPTION = re.compile(r"((?:\w+\.)*\w*(?:Error|Exception))(?::|$)")
_MAX_REASON_CHARS = 600
_TAIL_BYTES = 65_536
_LOOK_EVERY_S = 0.1


class LaunchLog:
    """The launcher's own log, `OUT/logs/<command>.log`: appends lines to it and shows them."""

    def __init__(self, path: Path, show: Callable[[str], None]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._show = show

    def note(self, text: str) -> None:
        """Log without showing."""
        # On a full disk the children will fail. The launcher must survive to stop them in order.
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as log:
            log.writelines(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}\n" for line in text.splitlines())

    def say(self, text: str) -> None:
        """Log and show."""
        self.note(text)
        self._show(text)


@contextlib.contextmanager
def opened_for_attempt(spec: ProcessSpec) -> Iterator[tuple[BinaryIO, int]]:
    """Append a line to the child's log that begins this attempt; yields the file and the offset after that line."""
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    with spec.log.open("ab", buffering=0) as log:
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        attempt = "" if spec.attempt is None else f" attempt {spec.attempt},"
        with naming(spec.log):  # the disk may be full
            log.write(f"{HEAD}{attempt} {spec.name} started {started}: {shlex.join(spec.argv)}\n".encode())
        yield log, log.tell()


def tail(log: Path, lines: int, start_offset: int = 0) -> list[str]:
    """The last lines of a log after an offset in bytes, or one that says why it cannot be read."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start_offset, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"({log} cannot be read: {error.strerror})"]
    written = [line.rstrip() for line in text.split("\n") if line.strip()]
    return [readable(line) for line in written[-lines:]]


def reason_in(lines: Sequence[str], secrets: Iterable[str] = ()) -> str | None:
    """The last error in readable lines of a log, as one short line. None: they tell of none.

    From a traceback it takes only the exception's class: the text may hold rows of the data. `secrets` are hidden.
    """
    found = None
    for line in (each for entry in lines for each in entry.splitlines()):
        if (error := _ERROR.match(line)) is not None:
            found = error[1]
        elif (exception := _EXCEPTION.match(line)) is not None:
            found = exception[1] if found is None else f"{found.partition(': ' + exception[1])[0]}: {exception[1]}"
    if found is None:
        return None
    for secret in filter(None, secrets):
        found = found.replace(secret, "***")
    return cut_inside(found, _MAX_REASON_CHARS)


class Follower:
    """Reads what is appended to a file that may not exist yet. While it cannot be read, there is nothing new."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        self._partial = b""

    @classmethod
    def at_end(cls, path: Path) -> Follower:
        """Follow only what is written from now on."""
        try:
            return cls(path, path.stat().st_size)
        except OSError:
            return cls(path)

    def read(self) -> bytes:
        """All new bytes."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:  # also a stale handle of a network file system, which works again later
            return b""
        self._offset += len(new)
        return new

    def lines(self) -> list[str]:
        """Every new complete line, without its line ending."""
        *complete, self._partial = (self._partial + self.read()).split(b"\n")
        return [line.decode(errors="replace").rstrip("\r") for line in complete]

    def new_lines(self) -> list[str]:
        """`lines` of a log as text, without those that begin attempts."""
        return [readable(line) for line in self.lines() if not line.startswith(HEAD)]

    @property
    def unfinished_line(self) -> str:
        """The beginning of a line that has not ended yet."""
        return self._partial.decode(errors="replace")


@contextlib.contextmanager
def polled(look: Callable[[], None], name: str, every_s: float = _LOOK_EVERY_S) -> Iterator[None]:
    """Call `look` in a thread during the block, and once more after it.

    An OSError ends that call and nothing else: the terminal is gone, or a network file system has a stale handle for a
    while.
    """
    done = threading.Event()

    def keep_looking() -> None:
        is_done = False
        while not is_done:
            is_done = done.wait(every_s)
            with contextlib.suppress(OSError):
                look()

    thread = threading.Thread(target=keep_looking, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def shown(log: Path) -> Iterator[None]:
    """Copy what is appended to a log during the block to stdout, except the lines that begin attempts."""
    follower = Follower.at_end(log)
    with polled(lambda: _show(follower.new_lines()), name=f"show-{log.name}"):
        yield
    # A process that was killed leaves a line without an end.
    _show([readable(follower.unfinished_line)] if follower.unfinished_line else [])


def _show(lines: list[str]) -> None:
    if lines:
        sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode())
        sys.stdout.flush()
