"""What the user sees while a job runs: one screen for each command."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from prime_rl.history.run import RunHistory
from prime_rl.launch.job import Job, command_prefix
from prime_rl.launch.logs import Follower, polled, shown
from prime_rl.launch.run import Screen
from prime_rl.utils.logger import readable
from prime_rl.watch.display import LiveDisplay, display_for
from prime_rl.watch.overview.facts import Reader
from prime_rl.watch.overview.following import is_live
from prime_rl.watch.overview.status import StatusFile, kept
from prime_rl.watch.progress import RunProgress
from prime_rl.watch.watcher import LogWatcher, Watcher, watching

if TYPE_CHECKING:
    from prime_rl.configs.rl import RLConfig


_OF_INTEREST = re.compile(r"\d\d:\d\d:\d\d\S*\s+\S*(SUCCESS|WARNING|ERROR)|still to evaluate: ")
"""Lines of an evaluator's log that the user of a training wants to see."""


def _write_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class LogScreen:
    """Shows the log of one child, with the launcher's lines in between."""

    job: Job
    child: str
    say: Callable[[str], None] = _write_line

    def line(self, text: str) -> None:
        self.say(text)

    def summary(self, succeeded: bool) -> str | None:
        return f"Done: {self.job.command} in {self.job.paths.root}" if succeeded else None

    def has_shown(self, child: str) -> bool:
        return child == self.child


@dataclass(frozen=True, slots=True)
class RunScreen:
    """Shows each finished step of an RL run with its reward, and what each child is doing."""

    watcher: Watcher
    started_s: float = field(default_factory=time.monotonic)

    def line(self, text: str) -> None:
        self.watcher.say(text)

    def summary(self, succeeded: bool) -> str:
        return self.watcher.progress.summary(time.monotonic() - self.started_s)

    def has_shown(self, child: str) -> bool:
        return False


@contextlib.contextmanager
def sft_screen(job: Job) -> Iterator[Screen]:
    """The trainer's log with the results of evaluations, and on a terminal the overview below it."""
    with kept(status_of(job)), _log_screen(job, "trainer") as screen, _evaluations_shown(job, screen):
        yield screen


@contextlib.contextmanager
def _evaluations_shown(job: Job, screen: Screen) -> Iterator[None]:
    """Show what an evaluator next to a training has found, until the block ends."""
    logs = [process.log for process in job.processes if process.name == "evaluator"]
    if not logs:
        yield
        return
    follower = Follower.at_end(logs[0])

    def look() -> None:
        for line in map(readable, follower.lines()):
            if _OF_INTEREST.search(line):
                screen.line(line)

    with polled(look, name="evaluations"):
        yield


@contextlib.contextmanager
def rl_screen(job: Job) -> Iterator[Screen]:
    """The steps of the run, and on a terminal a live view below them."""
    progress = RunProgress(cast("RLConfig", job.configs["rl"]).trainer.max_steps)
    logs = {spec.name: Follower.at_end(spec.log) for spec in job.processes if spec.rank == 0}
    display = display_for(sys.stdout, Reader(RunHistory.open(job.paths.root)))
    watcher = Watcher(progress, display, Follower.at_end(job.paths.metrics), logs)
    with kept(status_of(job)), watching(watcher, display):
        yield RunScreen(watcher)


@contextlib.contextmanager
def eval_screen(job: Job) -> Iterator[Screen]:
    """The evaluator's log, and on a terminal the overview below it."""
    with kept(status_of(job)), _log_screen(job, "evaluator") as screen:
        yield screen


@contextlib.contextmanager
def _log_screen(job: Job, child: str) -> Iterator[Screen]:
    log = job.process(child).log
    if not is_live(sys.stdout):
        with shown(log):
            yield LogScreen(job, child)
        return
    display = LiveDisplay(sys.stdout, Reader(RunHistory.open(job.paths.root)))
    watcher = LogWatcher(Follower.at_end(log), display)
    with watching(watcher, display):
        yield LogScreen(job, child, watcher.say)


def status_of(job: Job) -> StatusFile:
    """`OUT/STATUS.md` of a job that this process launches."""
    prefix = command_prefix(os.environ)
    return StatusFile(job.paths, lambda: job.how_to_continue(sys.argv, os.environ), command_prefix=prefix)
