"""Writes what a process does to `OUT/traces/<process>.jsonl`, one event in Chrome's trace format per line.

Times are microseconds since the epoch, so that the files of several processes fit together. The launcher turns traces
on with two environment variables; without them nothing is written and a span costs less than a microsecond.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from prime_rl.run.paths import TRACE_VARIABLE
from prime_rl.run.process import own_beats
from prime_rl.utils.logger import ATTEMPT_VARIABLE, get_logger

Category = Literal["compute", "comm", "io", "sync", "scheduler"]

_LIMIT_VARIABLE = "TRACE_LIMIT_MIB"

DEFAULT_MIB = 256

PHASES_THREAD = 0
"""Thread id of the row that shows what the process as a whole does."""
_STEP = re.compile(r"^step (\d+): ")
_DETAIL = re.compile(r"[;:,].*|\s*/.*|\s*\b\d+\b")
_CATEGORIES: tuple[tuple[str, Category], ...] = (
    ("publishing", "comm"),
    ("sending", "comm"),
    ("saving", "io"),
    ("exporting", "io"),
    ("reading", "io"),
    ("loading", "io"),
    ("connecting", "comm"),
    ("waiting", "scheduler"),
    ("pausing", "scheduler"),
    ("paused", "scheduler"),
)
"""Category of a phase by its first word."""


class Trace:
    """The events of one process. Any thread may use it."""

    def __init__(self, file: Path | None, limit_bytes: int = 0) -> None:
        """Append to `file` until it holds `limit_bytes`. Without a file, record nothing."""
        self._fd = None if file is None else _opened(file)
        self._limit_bytes = limit_bytes
        self._written_bytes = 0 if self._fd is None else os.fstat(self._fd).st_size
        self._threads: set[int] = set()
        self._phase: str | None = None
        self._lock = threading.Lock()
        if file is not None:
            attempt = os.environ.get(ATTEMPT_VARIABLE)
            self._write("M", "process_name", PHASES_THREAD, args={"name": file.stem, "attempt": attempt})
            self._write("M", "thread_name", PHASES_THREAD, args={"name": "phases"})

    @property
    def is_on(self) -> bool:
        return self._fd is not None

    @contextmanager
    def span(self, name: str, category: Category, **args: Any) -> Iterator[None]:
        """Record the block. Blocks of one thread may be nested, but those of tasks must use `begin` and `end`."""
        if self._fd is None:
            yield
            return
        start_us, started_s = now_us(), time.perf_counter()
        try:
            yield
        finally:
            duration_us = max(1, round(1e6 * (time.perf_counter() - started_s)))
            self._write("X", name, self._thread(), cat=category, ts=start_us, dur=duration_us, args=args)

    def begin(self, name: str, id: str, at_us: int | None = None, **args: Any) -> None:
        """Begin something of which several run at once, such as a rollout. `name` and `id` identify it."""
        self._write("b", name, PHASES_THREAD, cat="session", id=id, ts=at_us, args=args)

    def mark(self, name: str, id: str, **args: Any) -> None:
        """Record a moment of what `begin` has begun with this id."""
        self._write("n", name, PHASES_THREAD, cat="session", id=id, args=args)

    def end(self, name: str, id: str, at_us: int | None = None, **args: Any) -> None:
        self._write("e", name, PHASES_THREAD, cat="session", id=id, ts=at_us, args=args)

    def phase(self, doing: str, waits_for: str | None = None) -> None:
        """Record what the process does from now on. Ends the phase before.

        The beginning is written at once, so that the trace of a process that hangs shows in which phase.
        """
        if self._fd is None:
            return
        step = _STEP.match(doing)
        words = doing[step.end() :] if step else doing
        # One name for the same phase of all steps, so that the viewer gives it one colour and adds up its time.
        name = _DETAIL.sub("", words).strip() or words
        args: dict[str, Any] = {"doing": doing}
        if waits_for is not None:
            args["waits_for"] = waits_for
        if step:
            args["step"] = int(step.group(1))
        with self._lock:
            self._end_phase()
            self._phase = name
            self._write("B", name, PHASES_THREAD, cat=phase_category(words, waits_for), args=args)

    def close(self) -> None:
        """End the phase, and write nothing more."""
        with self._lock:
            self._end_phase()
            fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._write("E", self._phase, PHASES_THREAD)
            self._phase = None

    def _thread(self) -> int:
        thread = threading.get_native_id()
        if thread not in self._threads:
            self._threads.add(thread)
            self._write("M", "thread_name", thread, args={"name": threading.current_thread().name})
        return thread

    def _write(self, kind: str, name: str, thread: int, ts: int | None = None, **more: Any) -> None:
        if self._fd is None or self._written_bytes > self._limit_bytes:
            return
        event = {"ph": kind, "name": name, "pid": os.getpid(), "tid": thread, "ts": ts or now_us()} | more
        line = json.dumps({key: value for key, value in event.items() if value != {}}, separators=(",", ":"))
        self._written_bytes += len(line) + 1
        if self._written_bytes > self._limit_bytes:
            get_logger().warning(f"The trace has {self._limit_bytes >> 20} MiB (trace.max_mib): it ends here")
            return
        try:
            os.write(self._fd, line.encode() + b"\n")
        except OSError as error:
            get_logger().warning(f"Cannot write the trace ({error.strerror}): it ends here; the run continues")
            self._written_bytes = self._limit_bytes + 1


def now_us() -> int:
    return time.time_ns() // 1000


def phase_category(words: str, waits_for: str | None) -> Category:
    """The category of a phase: `sync` if it waits for another process, otherwise by its first word."""
    if waits_for is not None:
        return "sync"
    return next((category for word, category in _CATEGORIES if words.startswith(word)), "compute")


@functools.cache
def own_trace() -> Trace:
    """The trace of this process, which follows its heartbeat. It is off unless the launcher has turned it on."""
    file = os.environ.get(TRACE_VARIABLE)
    if not file:
        return Trace(None)
    trace = Trace(Path(file), int(os.environ.get(_LIMIT_VARIABLE, DEFAULT_MIB)) << 20)
    own_beats().follow(trace.phase)
    atexit.register(trace.close)
    return trace


def trace_env(file: Path, limit_mib: int) -> dict[str, str]:
    """Variables that turn the trace of a process on."""
    return {TRACE_VARIABLE: str(file), _LIMIT_VARIABLE: str(limit_mib)}


def _opened(file: Path) -> int | None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        get_logger().warning(f"Cannot write the trace {file}: {error.strerror}; the run continues without it")
        return None
    size_bytes = os.fstat(fd).st_size
    if size_bytes and os.pread(fd, 1, size_bytes - 1) != b"\n":
        os.write(fd, b"\n")  # an attempt that was killed has left half a line
    return fd
