"""Shows a job on the terminal while it runs: one screen for each command.

On a terminal it is a live overview; in a file, one line for each finished step and for each change of what a process
does. Threads read both from `OUT/metrics.jsonl`, the heartbeats and the logs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol, TextIO, cast

from prime_rl.history.run import RunHistory
from prime_rl.launch.job import Job, command_prefix
from prime_rl.launch.logs import HEAD, Follower, polled, shown
from prime_rl.launch.run import Screen
from prime_rl.run.process import is_replica
from prime_rl.utils.logger import readable
from prime_rl.utils.terminal import say
from prime_rl.watch.facts import Reader
from prime_rl.watch.progress import RunProgress, clock
from prime_rl.watch.status import StatusFile, kept

if TYPE_CHECKING:
    from prime_rl.configs.rl import RLConfig

# The live display.


FOLLOW_EVERY_S = 1.0
SCROLLING_LINES = 6
"""Lines of the terminal that the overview leaves to what scrolls above it."""


class Display(Protocol):
    """Shows progress."""

    def line(self, text: str) -> None:
        """Show a line that stays in the terminal's history."""

    def update(self) -> None:
        """Show the current state of the run."""

    def close(self) -> None: ...


class PlainDisplay:
    """Plain lines, for a file, a pipe or a batch job's log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def update(self) -> None:
        pass

    def close(self) -> None:
        pass


class LiveDisplay:
    """The overview of a run at the bottom of the terminal, below the scrolling lines."""

    def __init__(self, stream: TextIO, reader: Reader) -> None:
        from rich.console import Console
        from rich.live import Live

        self._reader = reader
        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self._next_look_s = 0.0

    def line(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text.from_ansi(text), soft_wrap=True)

    def update(self) -> None:
        from prime_rl.watch.overview import LiveView

        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + FOLLOW_EVERY_S
            self._live.update(LiveView(self._reader.read(), height_kept=SCROLLING_LINES), refresh=True)

    def close(self) -> None:
        self._live.stop()


def display_for(stream: TextIO, reader: Reader) -> Display:
    """A live display on a terminal that can move its cursor, otherwise plain lines."""
    from prime_rl.watch.overview import is_live  # imports rich, which a command needs only now

    return LiveDisplay(stream, reader) if is_live(stream) else PlainDisplay(stream)


# Lines, where there is no live display.


LOOK_EVERY_S = 0.25
_LOG_PREFIX = re.compile(r"^\d{2}:\d{2}:\d{2}\s+[A-Z]+\s+")
_VERDICT = re.compile(r"(Nothing|Little) was learned: .*")
_WARNING = re.compile(r"^\d{2}:\d{2}:\d{2}\s+WARNING\s")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_EVALUATION = re.compile(r"Evaluation on .* \| Version: ")
"""The line of an RL run's log with the scores of an evaluation."""
_STEP_LINE = re.compile(r"\bStep \d+ \| ")


class Watcher:
    """Follows the files of a run and updates a display. `say` may be called from any thread."""

    def __init__(
        self, progress: RunProgress, display: Display, metrics: Follower, logs: Mapping[str, Follower]
    ) -> None:
        self.progress = progress
        self._display = display
        self._metrics = metrics
        self._logs = logs
        self._said: SimpleQueue[str] = SimpleQueue()
        self._ready: set[str] = set()
        self._started_s = time.monotonic()
        self.verdict: str | None = None
        """The orchestrator's last line on a run that taught nothing."""

    def say(self, text: str) -> None:
        self._said.put(text)

    def look(self) -> None:
        """Show everything new."""
        with contextlib.suppress(Empty):
            while True:
                self._display.line(self._said.get_nowait())
        for name, follower in self._logs.items():
            for line in follower.lines():
                self._take_log_line(name, line)
        for line in self._metrics.lines():
            # A full disk leaves an incomplete line.
            with contextlib.suppress(ValueError):
                if self.progress.take(json.loads(line)):
                    for words in (self.progress.line(), *self.progress.part_lines()):
                        self._display.line(words)
        self._display.update()

    def _take_log_line(self, name: str, line: str) -> None:
        line = readable(line)
        words = _LOG_PREFIX.sub("", _ANSI.sub("", line).rpartition("\r")[2]).strip()
        if not words or line.startswith(HEAD):
            return
        if is_replica(name) and name not in self._ready and re.search(r"\bready\b", words, re.IGNORECASE):
            self._ready.add(name)
            self._display.line(f"{name} is ready after {clock(time.monotonic() - self._started_s)}")
        if name == "orchestrator" and (verdict := _VERDICT.search(words)):
            self.verdict = verdict.group()  # repeated as the last line of the run, where people look
        # A finished step is shown with its reward, which only the metrics contain.
        is_trainers = name == "trainer" and not _STEP_LINE.search(words)
        is_shown = _WARNING.match(_ANSI.sub("", line)) or _EVALUATION.match(words)
        if is_trainers or (name == "orchestrator" and is_shown):
            self._display.line(line.rstrip())


class LogWatcher:
    """Shows what is appended to one log, and updates a display. `say` may be called from any thread."""

    def __init__(self, log: Follower, display: Display) -> None:
        self._log = log
        self._display = display
        self._said: SimpleQueue[str] = SimpleQueue()

    def say(self, text: str) -> None:
        self._said.put(text)

    def look(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._display.line(self._said.get_nowait())
        for line in self._log.new_lines():
            self._display.line(readable(line))
        self._display.update()


@contextlib.contextmanager
def watching(watcher: Watcher | LogWatcher, display: Display) -> Iterator[None]:
    """Run a watcher during the block, and once more after it."""
    # After the last look, so that a terminal that is gone cannot fail the launch.
    with contextlib.ExitStack() as closing:
        closing.callback(_close, display)
        with polled(watcher.look, name="progress", every_s=LOOK_EVERY_S):
            yield


def _close(display: Display) -> None:
    with contextlib.suppress(OSError):
        display.close()


_OF_INTEREST = re.compile(r"\d\d:\d\d:\d\d\S*\s+\S*(SUCCESS|WARNING|ERROR)|still to evaluate: ")
"""Lines of an evaluator's log that the user of a training wants to see."""


@dataclass(frozen=True, slots=True)
class LogScreen:
    """Shows the log of one child, with the launcher's lines in between."""

    job: Job
    child: str
    say: Callable[[str], None] = say

    def line(self, text: str) -> None:
        self.say(text)

    def summary(self, succeeded: bool) -> str | None:
        return f"Done: {self.job.command} in {self.job.paths.root}" if succeeded else None

    def verdict(self) -> str | None:
        return None

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

    def verdict(self) -> str | None:
        return self.watcher.verdict

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
    from prime_rl.watch.overview import is_live

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
