"""A live line on the terminal: progress, latest values and remaining time."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from prime_rl.utils.logger import get_logger
from prime_rl.watch.progress import Pace, clock, step_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def figures(metrics: Mapping[str, Any]) -> str:
    """The values of a step that the bar shows."""
    shown = (
        ("loss/mean", "loss {:.4f}"),
        ("perf/throughput", "{:,.0f} tokens/s"),
        ("perf/mfu", "MFU {:.0f}%"),
        ("perf/peak_memory", "{:.1f} GiB"),
    )
    return "  ".join(words.format(metrics[name]) for name, words in shown if metrics.get(name) is not None)


class ProgressBar(Protocol):
    """Shows the state of a run."""

    def update(self, step: int, figures: str) -> None:
        """Show that `step` steps are done, with a short text about the last one."""


class _NoBar:
    def update(self, step: int, figures: str) -> None:
        """The log has the same values."""


@contextmanager
def progress_bar(name: str, total_steps: int | None, shown: bool = True) -> Iterator[ProgressBar]:
    """Show a bar below the log during the block, if stdout is a terminal. `total_steps` None has no end."""
    if not shown or not sys.stdout.isatty():
        yield _NoBar()
        return
    plain_stdout = sys.stdout
    with rich_bar(name, total_steps) as bar:
        # While the bar exists, `sys.stdout` prints above it; the log must use it too.
        _redirect_log(plain_stdout, sys.stdout)
        try:
            yield bar
        finally:
            _redirect_log(sys.stdout, plain_stdout)


@contextmanager
def rich_bar(name: str, total_steps: int | None) -> Iterator[ProgressBar]:
    """A bar at the bottom of the terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(f"[bold]{name}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[steps]}"),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns) as bar:
        task = bar.add_task(name, total=total_steps, steps=step_text(0, total_steps), figures="", left="")
        yield _RichBar(bar, task, Pace(total_steps))


class _RichBar:
    def __init__(self, bar: Progress, task: TaskID, pace: Pace) -> None:
        self.bar = bar
        self.task = task
        self.pace = pace

    def update(self, step: int, figures: str) -> None:
        left_s = self.pace.left_s(step, time.monotonic())
        left = "" if left_s is None else f"{clock(left_s)} left"
        steps = step_text(step, self.pace.total_steps)
        self.bar.update(self.task, completed=step, steps=steps, figures=figures, left=left)


def _redirect_log(old: TextIO, new: TextIO) -> None:
    for handler in get_logger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:
            handler.setStream(new)
