"""Shows what happens in a run: one line for each finished step, and what each child is doing.

A thread reads it from `OUT/metrics.jsonl` and the children's logs.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from queue import Empty, SimpleQueue

from prime_rl.launch.logs import HEAD, Follower, polled
from prime_rl.run.beats import is_replica
from prime_rl.utils.logger import readable
from prime_rl.watch.display import Display
from prime_rl.watch.progress import RunProgress, clock

LOOK_EVERY_S = 0.25
_LOG_PREFIX = re.compile(r"^\d{2}:\d{2}:\d{2}\s+[A-Z]+\s+")
_WARNING = re.compile(r"^\d{2}:\d{2}:\d{2}\s+WARNING\s")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
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
        # A finished step is shown with its reward, which only the metrics contain.
        is_trainers = name == "trainer" and not _STEP_LINE.search(words)
        if is_trainers or (name == "orchestrator" and _WARNING.match(_ANSI.sub("", line))):
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
