"""A live line on the terminal: how far the run is, its last figures, and the time left."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from prime_rl.utils.logger import get_logger


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
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn(f"[bold]{name}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    plain_stdout = sys.stdout
    with Progress(*columns) as bar:
        # While the bar lives, `sys.stdout` prints above it; the log has to take that way too.
        _redirect_log(plain_stdout, sys.stdout)
        try:
            yield _RichBar(bar, bar.add_task(name, total=total_steps, figures=""))
        finally:
            _redirect_log(sys.stdout, plain_stdout)


class _RichBar:
    def __init__(self, bar, task: int) -> None:
        self.bar = bar
        self.task = task

    def update(self, step: int, figures: str) -> None:
        self.bar.update(self.task, completed=step, figures=figures)


def _redirect_log(old: object, new) -> None:
    for handler in get_logger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:
            handler.setStream(new)
