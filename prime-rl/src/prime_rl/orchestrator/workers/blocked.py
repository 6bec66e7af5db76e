"""Counts the code of environments that blocks an event loop, wherever it runs: names it once, and what helps."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from prime_rl.orchestrator.workers.inside.frames import BadFrame
from prime_rl.utils.logger import get_logger

MAX_PLACES = 100
"""Functions that are counted by their names. The report may come from a process that does what it likes."""
MAX_CHARS = 300
SUGGESTED_THREADS = 32
SUGGESTED_PROCESSES = 8


class _Block(msgspec.Struct):
    function: str
    place: str
    seconds: float
    count: int
    waits: bool
    is_plain: bool


class _Report(msgspec.Struct):
    """The state of an event loop since the last answer, reported by an environment's process."""

    lag_s: float
    blocks: list[_Block]


Report = Callable[[Any], None]
"""Takes the report of an environment's process about its event loop. Raises BadFrame."""


def ignore_report(report: Any) -> None:
    """A `Report` for processes that nobody watches."""


@dataclass(slots=True)
class _Total:
    first: _Block
    seconds: float = 0.0
    count: int = 0


@dataclass(slots=True)
class BlockedLoops:
    """Blocks by environment and function. Reports come from the event loop, and from the thread that watches it."""

    _totals: dict[tuple[str, str], _Total] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=dict)
    """By environment, since the metrics were taken; so are the delays of the processes."""
    _lag_s: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_report(self, env: str, report: Any) -> None:
        """Add what an environment's process sends with an answer. Raises BadFrame if it is no report."""
        try:
            read = msgspec.convert(report, _Report)
        except msgspec.ValidationError as error:
            raise BadFrame(f"a message that says nothing of its event loop: {error}") from error
        if not all(math.isfinite(each) for each in (read.lag_s, *(block.seconds for block in read.blocks))):
            raise BadFrame("a message that says nothing of its event loop: a time is not finite")
        with self._lock:
            self._lag_s[env] = max(self._lag_s.get(env, 0.0), read.lag_s)
        for block in read.blocks:
            self._add(env, block)

    def add(self, env: str, block: dict[str, Any]) -> None:
        """Add a block of the orchestrator's own loop."""
        self._add(env, _Block(**block))

    def _add(self, env: str, block: _Block) -> None:
        key = env, block.function
        with self._lock:
            self._seconds[env] = self._seconds.get(env, 0.0) + block.seconds
            is_new = key not in self._totals
            if is_new and len(self._totals) >= MAX_PLACES:
                return
            total = self._totals.setdefault(key, _Total(block))
            total.seconds += block.seconds
            total.count += block.count
        if is_new:
            what = f"blocks the event loop for over a second: its other rollouts wait; {remedy(block)}"
            get_logger().warning(f"{_who(env)}: {_where(block)} {what}")

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
            lag_s, self._lag_s = self._lag_s, {}
        return {
            **{f"event_loop_blocked/{env or 'unknown'}": each for env, each in seconds.items()},
            **{f"event_loop_lag/{env}/max": each for env, each in lag_s.items()},
        }

    def conclude(self) -> None:
        """Log how often each function blocked the loop, and for how long."""
        for (env, _), total in sorted(self._totals.items(), key=lambda each: -each[1].seconds):
            if total.count > 1:
                blocked = f"blocked the event loop {total.count} times, for {total.seconds:.0f} s in all"
                get_logger().warning(f"{_who(env)}: {_where(total.first)} {blocked}; {remedy(total.first)}")


def _who(env: str) -> str:
    return f"environment {env!r}" if env else "an environment"


def _where(block: _Block) -> str:
    return f"{block.function[:MAX_CHARS]} ({block.place[-MAX_CHARS:]})"


def remedy(block: _Block) -> str:
    """What helps, by what the function does: a thread can wait for it, another process can compute it."""
    processes = f"num_workers = {SUGGESTED_PROCESSES} in its table runs it in that many processes"
    if not block.waits:
        return f"it computes: {processes}"
    if block.is_plain:
        return f"it waits: threads = {SUGGESTED_THREADS} in its table runs plain reward functions and tools in threads"
    return f"it waits without `await`: call `await asyncio.to_thread(function, ...)` there, or {processes}"
