"""Tells the launcher what a process is doing, so that one that hangs is found.

Each process has a file, `OUT/control/<process>.beat`. Its first line is overwritten in place; what follows is left from
longer lines. A process writes when it makes progress, never by a timer, which would go on while the process hangs. A
write takes a few microseconds and is not flushed to disk.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_rl.run.paths import TRACE_VARIABLE

HEARTBEAT_VARIABLE = "BEAT_FILE"
"""Environment variable of a process: the file of its heartbeat."""

ANYONE = "*"
"""`Heartbeat.waits_for` of a server without a request: it is idle, and no other process is to blame for that."""

SERVERS_VARIABLE = "INFERENCE_SERVERS"
"""Environment variable of a process that uses several inference servers: their names by URL, as JSON."""

MAX_WORDS_CHARS = 300
TICK_INTERVAL_S = 1.0
"""Ticks that follow a record sooner are not written."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Activity of a process when it last made progress."""

    count: int
    """Number of records so far. A higher one is progress."""
    at_s: float
    """Time of the record, in seconds since the epoch."""
    doing: str
    waits_for: str | None = None
    """The process that it waits for, by name, or `ANYONE`. None if it works."""
    is_started: bool = True
    """False until the process has done everything that happens once: imports, loading, compilation."""
    pids: Sequence[int] = ()
    """The process, and others that work for it. If a signal stops one of them, the work stops."""


class HeartbeatWriter:
    """Writes the heartbeat of this process. Without a file it does nothing. Any thread may use it."""

    def __init__(self, file: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._fd = None if file is None else _opened(file)
        self._count = 0
        self._written_s = 0.0
        self._doing = "starting"
        self._waits_for: str | None = None
        self._is_started = False
        self._calls: dict[str, int] = {}
        self._counting = threading.Lock()
        self._pids = [os.getpid()]
        self._followers: list[Callable[[str, str | None], None]] = []

    def follow(self, follower: Callable[[str, str | None], None]) -> None:
        """Call `follower` with everything that is said, beginning with what was said last."""
        self._followers.append(follower)
        follower(self._doing, self._waits_for)

    def say(self, doing: str, waits_for: str | None = None) -> None:
        """Report what the process does from now on. A repeated text does not count as progress."""
        if (doing, waits_for) != (self._doing, self._waits_for):
            self._doing, self._waits_for = doing, waits_for
            self._write()
            for follower in self._followers:
                follower(doing, waits_for)

    def tick(self) -> None:
        """Report progress in what was said last."""
        if self._fd is not None and self._clock() - self._written_s >= TICK_INTERVAL_S:
            self._write()

    def started(self) -> None:
        """Report that everything that happens once is done. From now on `stall.timeout_s` holds."""
        if not self._is_started:
            self._is_started = True
            self._write()

    def include(self, pids: Iterable[int]) -> None:
        """Report that other processes do the work of this one."""
        self._pids += pids
        self._write()

    @contextlib.contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Report that the process waits for another during the block, unless it waits for something else."""
        if self._count_calls(name, 1) == 1:
            self._write()
        try:
            yield
        finally:
            if self._count_calls(name, -1):
                self.tick()
            else:
                self._write()

    def _count_calls(self, name: str, change: int) -> int:
        with self._counting:
            count = self._calls.get(name, 0) + change
            self._calls[name] = count
            if not count:
                del self._calls[name]
            return count

    def _write(self) -> None:
        if self._fd is None:
            return
        self._count += 1
        self._written_s = self._clock()
        with self._counting:
            # The one that is called for the longest time without a gap.
            called = next(iter(self._calls), None)
        waits_for = self._waits_for or called
        words = self._doing[:MAX_WORDS_CHARS]
        record = json.dumps([self._count, time.time(), words, waits_for, self._is_started, self._pids]).encode()
        # A full disk must not end the process.
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, record + b"\n", 0)


def _opened(file: Path) -> int | None:
    try:
        return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:  # a full disk must not end the process here, either
        return None


@functools.cache
def own_beats() -> HeartbeatWriter:
    """The heartbeat of this process. It goes nowhere in a process that no launcher has started."""
    file = os.environ.get(HEARTBEAT_VARIABLE)
    return HeartbeatWriter(None if file is None else Path(file))


def replica_name(replica: int) -> str:
    """Process and log of an inference server of a launch: `inference`, `inference_1` and so on."""
    return f"inference_{replica}" if replica else "inference"


def is_replica(name: str) -> bool:
    """Whether a process is an inference server."""
    return re.fullmatch(r"inference(_\d+)?", name) is not None


def server_name(url: str) -> str:
    """The process that serves a URL. A wait for `inference` may be for any server of the launch."""
    return _server_names().get(url.rstrip("/"), replica_name(0))


@functools.cache
def _server_names() -> dict[str, str]:
    return dict(json.loads(os.environ.get(SERVERS_VARIABLE, "{}")))


def helper_heartbeat_env(name: str) -> dict[str, str]:
    """Variables for a process that helps this one: its heartbeat is progress of this process."""
    file = os.environ.get(HEARTBEAT_VARIABLE)
    # A trace belongs to one process.
    return {} if file is None else {HEARTBEAT_VARIABLE: f"{file}+{name.replace('/', '--')}", TRACE_VARIABLE: ""}


def read_heartbeats(file: Path) -> Iterator[Heartbeat]:
    """The newest heartbeat of a process, followed by those of its helpers. A process that has not begun has none."""
    helpers: list[Path] = []
    # A network file system may have a stale handle of the directory for a while.
    with contextlib.suppress(OSError):
        helpers = sorted(file.parent.glob(f"{file.name}+*"))
    for each in (file, *helpers):
        # Missing, or being written.
        with contextlib.suppress(OSError, ValueError, TypeError):
            yield Heartbeat(*json.loads(each.read_bytes().partition(b"\n")[0]))


def clear_heartbeats(file: Path) -> None:
    """Remove the heartbeats of an earlier launch, and make their directory."""
    file.parent.mkdir(parents=True, exist_ok=True)
    for each in (file, *file.parent.glob(f"{file.name}+*")):
        each.unlink(missing_ok=True)
