"""Reads the stacks that Python processes write to their logs (`utils/signals.py`)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence

from prime_rl.launch.logs import Follower

LIMIT_S = 5.0
QUIET_S = 0.5
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
    while now_s < deadline_s and not (all(written.values()) and now_s - quiet_since_s >= QUIET_S):
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
