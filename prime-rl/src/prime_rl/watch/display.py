"""Shows a run's progress: live on a terminal, or as lines in a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from prime_rl.watch.progress import RunProgress, sparkline


class Display(Protocol):
    """Shows progress."""

    def line(self, text: str) -> None:
        """Show a line that stays in the terminal's history."""

    def update(self, progress: RunProgress, doing: Mapping[str, str]) -> None:
        """Show the current state. `doing` is the last log line of each child."""

    def close(self) -> None: ...


class PlainDisplay:
    """Plain lines, for a file, a pipe or a batch job's log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def update(self, progress: RunProgress, doing: Mapping[str, str]) -> None:
        pass

    def close(self) -> None:
        pass


class LiveDisplay:
    """A bar at the bottom of the terminal, below the scrolling lines."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def line(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text.from_ansi(text), soft_wrap=True)

    def update(self, progress: RunProgress, doing: Mapping[str, str]) -> None:
        self._live.update(self._foot(progress, doing), refresh=True)

    def _foot(self, progress: RunProgress, doing: Mapping[str, str]) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        children = Table.grid(padding=(0, 2))
        for name, words in doing.items():
            children.add_row(Text(name, style="cyan"), Text(words, style="dim", overflow="ellipsis", no_wrap=True))
        if not progress.step:
            return children
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            ProgressBar(total=progress.max_steps, completed=progress.step, width=24, pulse=progress.max_steps is None),
            Text(sparkline(progress.reward_course), style="green", no_wrap=True),
        )
        # On rows of their own, so that a terminal of 80 columns shows all of them.
        lines = (Text(line, no_wrap=True, overflow="ellipsis") for line in (progress.line(), *progress.part_lines()))
        return Group(children, *lines, bar)

    def close(self) -> None:
        self._live.stop()


def display_for(stream: TextIO) -> Display:
    from rich.console import Console

    # A dumb terminal cannot move its cursor.
    console = Console(file=stream)
    return LiveDisplay(stream) if console.is_terminal and not console.is_dumb_terminal else PlainDisplay(stream)
