"""Finds the process of a run that is stalled, from the heartbeats of all, and reads its stacks from its log.

A process that waits for another is not stalled itself: the one at the end of the chain is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prime_rl.launch.logs import Follower
from prime_rl.run.process import ANYONE, Heartbeat, is_replica, replica_name

LOOK_EVERY_S = 2.0
QUIET_S = 60.0
"""A process that fails may have waited for one that has been silent for so long."""
LONGEST_GAP_S = 2 * LOOK_EVERY_S
"""Longest time between two looks that counts. For the rest, the launcher itself was stopped."""


@dataclass(frozen=True, slots=True)
class StallLimits:
    """Seconds without progress after which a process is stalled. None never stalls."""

    timeout_s: float | None = None
    """Once the process has started."""
    startup_timeout_s: float | None = None
    """Until then."""
    stopped_timeout_s: float | None = None
    """While a signal (SIGSTOP) holds the process."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Result of one look at a process."""

    heartbeats: Sequence[Heartbeat] = ()
    """Its newest heartbeat, followed by those of its helpers. Empty if it has not begun."""
    stopped: tuple[int, ...] = ()
    """Ids of its processes that a signal has stopped (state T)."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """A process makes no progress, and neither does what it waits for."""

    roots: tuple[str, ...]
    """The process at which the others wait. Several if they wait for each other, or if it is not known which."""
    lines: tuple[str, ...]
    """The event, and the activity of every process."""


@dataclass(slots=True)
class _Process:
    """The watchdog's record of one process. Times are those of the watchdog's clock."""

    since_s: float
    since: float
    """Time of the last progress, in seconds since the epoch."""
    counts: tuple[int, ...] = ()
    heartbeats: Sequence[Heartbeat] = ()
    stopped: tuple[int, ...] = ()
    stopped_since_s: float = 0.0
    stopped_since: float = 0.0

    @property
    def waits_for(self) -> str | None:
        return next((beat.waits_for for beat in self.heartbeats if beat.waits_for is not None), None)

    @property
    def is_started(self) -> bool:
        return bool(self.heartbeats) and self.heartbeats[0].is_started

    @property
    def words(self) -> str:
        doing = self.heartbeats[0].doing if self.heartbeats else "starting"
        return doing + (" (stopped by a signal)" if self.stopped else "")


@dataclass(slots=True)
class Watchdog:
    """Watches the processes of a run. Call `look` every few seconds."""

    limits: StallLimits
    now_s: Callable[[], float] = time.monotonic
    _processes: dict[str, _Process] = field(default_factory=dict)
    _known: set[str] = field(default_factory=set)
    """Names of all processes so far, with those that have ended."""
    _clock_s: float = 0.0
    """Counts only while the launcher runs."""
    _looked_s: float | None = None

    def look(self, observed: Mapping[str, Observed]) -> Stalled | None:
        """Record what was observed of each process that runs, and tell if the run is stalled."""
        now_s = self.now_s()
        if self._looked_s is not None:
            self._clock_s += min(now_s - self._looked_s, LONGEST_GAP_S)
        self._looked_s = now_s
        self._known.update(observed)
        self._processes = {name: self._update(name, seen) for name, seen in observed.items()}
        return self._stopped() or self._silent()

    def quiet(self, names: Iterable[str]) -> list[str]:
        """One line for each of these processes that has started and works without progress for `QUIET_S` or more."""
        known = ((name, self._processes[name]) for name in names if name in self._processes)
        return [
            f"{name} made no progress since {_clock(process.since)}; it was: {process.words}"
            for name, process in known
            if process.is_started and process.waits_for is None and self._clock_s - process.since_s >= QUIET_S
        ]

    def _update(self, name: str, seen: Observed) -> _Process:
        process = self._processes.get(name) or _Process(self._clock_s, time.time())
        counts = tuple(beat.count for beat in seen.heartbeats)
        if counts != process.counts:
            process.counts, process.heartbeats = counts, seen.heartbeats
            process.since_s, process.since = self._clock_s, max(beat.at_s for beat in seen.heartbeats)
        if not process.stopped:
            process.stopped_since_s, process.stopped_since = self._clock_s, time.time()
        process.stopped = seen.stopped
        return process

    def _stopped(self) -> Stalled | None:
        limit_s = self.limits.stopped_timeout_s
        for name, process in self._processes.items():
            if limit_s is not None and process.stopped and self._clock_s - process.stopped_since_s >= limit_s:
                pids = ", ".join(map(str, process.stopped))
                headline = (
                    f"{name} was stopped by a signal (process {pids}) at {_clock(process.stopped_since)} and was "
                    f"not continued within {limit_s:g} s (stall.stopped_timeout_s)"
                )
                return Stalled((name,), (headline, *self._all_words()))
        return None

    def _silent(self) -> Stalled | None:
        overdue = [name for name in self._processes if self._is_overdue(name)]
        stalls = {roots for name in overdue if (roots := self._roots(name)) and set(roots) <= set(overdue)}
        if not stalls:
            return None
        # The ranks of a trainer wait for each other in collectives, and do not know for whom: the first comes first.
        found = sorted({root for roots in stalls for root in roots}, key=self._since)
        return self._stalled(tuple(found), is_cycle=len(stalls) == 1 and len(found) > 1)

    def _since(self, name: str) -> tuple[float, str]:
        return self._processes[name].since, name

    def _is_overdue(self, name: str) -> bool:
        limit_s, _ = self._limit(self._processes[name])
        return limit_s is not None and self._clock_s - self._processes[name].since_s >= limit_s

    def _limit(self, process: _Process) -> tuple[float | None, str]:
        if process.is_started:
            return self.limits.timeout_s, "stall.timeout_s"
        return self.limits.startup_timeout_s, "stall.startup_timeout_s"

    def _roots(self, name: str) -> tuple[str, ...]:
        """The processes at the end of the chain of waits that starts with `name`: one, or those that form a cycle.

        An idle server is not at the end of a chain: who waits for it has not asked it for anything. Empty if `name`
        itself is idle, or if the chain leads to a process that this launch has not started: for that, other keys have
        limits, such as `client.timeout`.
        """
        chain = [name]
        while True:
            waits_for = self._awaited(self._processes[chain[-1]].waits_for)
            if waits_for == ANYONE:
                return tuple(chain[-2:-1])
            if waits_for is not None and waits_for not in self._known:
                return ()
            if waits_for not in self._processes:
                return (chain[-1],)
            if waits_for in chain:
                return tuple(sorted(chain[chain.index(waits_for) :]))
            chain.append(waits_for)

    def _awaited(self, name: str | None) -> str | None:
        """The process that `name` stands for. A wait for `inference` may be for any server: the one that works, and has
        made no progress for the longest time, is meant."""
        if name != replica_name(0):
            return name
        working = [each for each, seen in self._processes.items() if is_replica(each) and seen.waits_for != ANYONE]
        return min(working, key=self._since, default=name)

    def _stalled(self, roots: tuple[str, ...], is_cycle: bool) -> Stalled:
        first, *others = roots
        process = self._processes[first]
        limit_s, key = self._limit(process)
        headline = f"{' and '.join(roots)} wait for each other" if is_cycle else f"{first} made no progress"
        headline += f" since {_clock(process.since)} (limit: {key} = {limit_s:g} s)"
        if others and not is_cycle:
            headline += f", and neither did {' and '.join(others)}"
        return Stalled(roots, (f"{headline}; it was: {process.words}", *self._all_words()))

    def _all_words(self) -> Iterable[str]:
        yield "what each process was doing:"
        for name, process in self._processes.items():
            waits_for = process.waits_for
            waiting = f"; waits for {waits_for}" if waits_for not in (None, ANYONE) else ""
            yield f"  {name}: {process.words}, since {_clock(process.since)}{waiting}"


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))


# Stacks that Python processes write to their logs (`utils/signals.py`).


LIMIT_S = 5.0
DUMP_QUIET_S = 0.5
"""Stacks are complete when no line of a stack has come for this long."""
MAX_LINES = 40
MAX_FRAMES = 10

_LOOK_EVERY_S = 0.05
_THREAD = re.compile(r"(Current thread|Thread) 0x")
_TASKS = re.compile(r"\d+ tasks? \(")
_OF_STACK = re.compile(f"{_THREAD.pattern}|{_TASKS.pattern}|  File ")
_IDLE = re.compile(r'(selectors|threading|concurrent/futures/thread|tqdm/_monitor)\.py", line \d+ in')
"""Innermost frame of a thread that waits for work."""


def new_stacks(logs: Mapping[str, Follower]) -> dict[str, list[str]]:
    """Wait until the processes have written their stacks; returns the most important lines, by name."""
    written: dict[str, list[str]] = {name: [] for name in logs}
    now_s = quiet_since_s = time.monotonic()
    deadline_s = now_s + LIMIT_S
    while now_s < deadline_s and not (all(written.values()) and now_s - quiet_since_s >= DUMP_QUIET_S):
        time.sleep(_LOOK_EVERY_S)
        now_s = time.monotonic()
        for name, follower in logs.items():
            if lines := list(filter(_OF_STACK.match, follower.lines())):
                written[name] += lines
                quiet_since_s = now_s
    return {name: condensed(lines) for name, lines in written.items()}


def condensed(lines: Sequence[str]) -> list[str]:
    """The stacks that are most likely to explain a stall: threads that work, then the tasks of the event loop."""
    stacks = list(_stacks(lines))
    tasks = [stack for stack in stacks if _TASKS.match(stack[0])]
    threads = [stack for stack in stacks if not _TASKS.match(stack[0]) and not _IDLE.search(" ".join(stack[1:2]))]
    kept: list[str] = []
    # The innermost frames come last in the stacks of tasks, and first in those of threads. The main thread is last.
    for stack in reversed(threads):
        kept += stack[: 1 + MAX_FRAMES]
    for stack in tasks:
        kept += [stack[0], *stack[1:][-MAX_FRAMES:]]
    return kept[:MAX_LINES]


def _stacks(lines: Sequence[str]) -> Iterator[list[str]]:
    """The heading and the frames of each thread, and of each group of tasks with the same frames."""
    stack: list[str] = []
    for line in lines:
        if _THREAD.match(line) or _TASKS.match(line):
            if stack:
                yield stack
            stack = [line]
        elif stack and line.startswith("  File "):
            stack.append(line)
    if stack:
        yield stack
