"""Shows a run's progress: live on a terminal, or as lines in a file."""

from __future__ import annotations

import time
from typing import Protocol, TextIO

from prime_rl.watch.overview.facts import Reader
from prime_rl.watch.overview.following import LiveView, is_live

LOOK_EVERY_S = 1.0
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
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_EVERY_S
            self._live.update(LiveView(self._reader.read(), height_kept=SCROLLING_LINES), refresh=True)

    def close(self) -> None:
        self._live.stop()


def display_for(stream: TextIO, reader: Reader) -> Display:
    """A live display on a terminal that can move its cursor, otherwise plain lines."""
    return LiveDisplay(stream, reader) if is_live(stream) else PlainDisplay(stream)
