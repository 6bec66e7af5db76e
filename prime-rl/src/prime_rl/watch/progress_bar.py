"""A live line on the terminal: how far the run is, its last figures, and the time left."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from prime_rl.utils.logger import get_logger

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_PACE_STEPS = 10
"""The time left is estimated from so many last steps."""


def clock(seconds: float) -> str:
    """`0:45`, `12:03`, `1:02:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def figures(metrics: Mapping[str, Any]) -> str:
    """What the bar shows of a step, from its metrics."""
    shown = (
        ("loss/mean", "loss {:.4f}"),
        ("perf/throughput", "{:,.0f} tokens/s"),
        ("perf/mfu", "MFU {:.0f}%"),
        ("perf/peak_memory", "{:.1f} GiB"),
    )
    return "  ".join(words.format(metrics[name]) for name, words in shown if metrics.get(name) is not None)


class Pace:
    """Estimates the time left from the last steps, so that a resumed run is not taken for a fast one."""

    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps
        self._ends: deque[tuple[int, float]] = deque(maxlen=_PACE_STEPS + 1)

    def left_s(self, step: int, now_s: float) -> float | None:
        """Seconds from now, when `step` steps are done; None while that cannot be told."""
        self._ends.append((step, now_s))
        (first_step, first_s), (last_step, last_s) = self._ends[0], self._ends[-1]
        if self.total_steps is None or last_step <= first_step:
            return None
        return max(0, self.total_steps - step) * (last_s - first_s) / (last_step - first_step)


class ProgressBar(Protocol):
    """Shows the state of a run."""

    def update(self, step: int, figures: str) -> None:
        """`step` steps are done; `figures` is a short text on the last one."""


class _NoBar:
    def update(self, step: int, figures: str) -> None:
        """Log lines tell the same where no one watches live."""


@contextmanager
def progress_bar(name: str, total_steps: int | None, shown: bool = True) -> Iterator[ProgressBar]:
    """Show a bar below the log while the block runs, if stdout is a terminal; `total_steps` None has no end."""
    if not shown or not sys.stdout.isatty():
        yield _NoBar()
        return
    plain_stdout = sys.stdout
    with rich_bar(name, total_steps) as bar:
        # While the bar lives, `sys.stdout` prints above it; the log has to take that way too.
        _redirect_log(plain_stdout, sys.stdout)
        try:
            yield bar
        finally:
            _redirect_log(sys.stdout, plain_stdout)


@contextmanager
def rich_bar(name: str, total_steps: int | None) -> Iterator[ProgressBar]:
    """The bar itself, at the foot of the terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(f"[bold]{name}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns) as bar:
        yield _RichBar(bar, bar.add_task(name, total=total_steps, figures="", left=""), Pace(total_steps))


class _RichBar:
    def __init__(self, bar: Progress, task: TaskID, pace: Pace) -> None:
        self.bar = bar
        self.task = task
        self.pace = pace

    def update(self, step: int, figures: str) -> None:
        left_s = self.pace.left_s(step, time.monotonic())
        left = "" if left_s is None else f"{clock(left_s)} left"
        self.bar.update(self.task, completed=step, figures=figures, left=left)


def _redirect_log(old: TextIO, new: TextIO) -> None:
    for handler in get_logger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:
            handler.setStream(new)
