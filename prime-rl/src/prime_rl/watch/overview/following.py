"""Follows a run until it ends: a live view on a terminal, otherwise a line for each new step, or JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from prime_rl.watch.overview.facts import LOSS, PART, Overview, Reader, as_json
from prime_rl.watch.progress import RunProgress

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

PLAIN_WIDTH = 80
NOT_COMPLETE = 1
"""Exit code for a run that failed, stopped or was killed before it was complete."""

_IN_A_LINE = ("reward/mean", LOSS, "perf/throughput")

Pause = Callable[[float], object]


def exit_code_of(overview: Overview) -> int:
    """0 for a run that is complete or goes on."""
    return 0 if overview.state.name in ("running", "complete") or has_not_begun(overview) else NOT_COMPLETE


def has_not_begun(overview: Overview) -> bool:
    """Whether its config was written, as for a job in a queue, and nothing more."""
    return overview.state.name == "unknown" and not overview.logs


def goes_on(overview: Overview) -> bool:
    return overview.is_running or has_not_begun(overview)


class LiveView:
    """Draws an overview for the size that the terminal has at that moment."""

    def __init__(self, overview: Overview, height_kept: int = 0) -> None:
        self.overview = overview
        self.height_kept = height_kept
        """Lines of the terminal that are left to others."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from prime_rl.watch.overview.screen import drawn

        yield drawn(self.overview, options.max_width, max(4, console.size.height - self.height_kept - 1))


def print_once(overview: Overview, stream: TextIO) -> None:
    """Print the overview in full: in colour on a terminal, otherwise plain at `PLAIN_WIDTH`."""
    from rich.console import Console

    from prime_rl.watch.overview.screen import drawn

    console = Console(file=stream, highlight=False, width=None if stream.isatty() else PLAIN_WIDTH)
    console.print(drawn(overview, console.width))


def print_json(overview: Overview, stream: TextIO, indent: int | None = None) -> None:
    stream.write(json.dumps(as_json(overview), indent=indent, default=str) + "\n")
    stream.flush()


def follow_json(reader: Reader, stream: TextIO, interval_s: float, pause: Pause = time.sleep) -> int:
    """Print one JSON object in a line at the start, after each change, and at the end."""
    shown = None
    for overview in _readings(reader, interval_s, pause):
        seen = (overview.steps_done, overview.state, overview.progress, overview.notices, overview.checkpoints)
        if seen != shown:
            print_json(overview, stream)
        shown = seen
    return exit_code_of(overview)


def follow_lines(reader: Reader, stream: TextIO, interval_s: float, pause: Pause = time.sleep) -> int:
    """Print where the run is, then a line for each new step, and at the end the overview."""
    lines, shown = StepLines(reader), set[str]()
    for overview in _readings(reader, interval_s, pause):
        new = [*lines.new(overview), *_eval_lines(overview)]
        if not lines.has_begun:
            where = overview.step_words or f"{sum(each.done for each in overview.progress):,} rollouts"
            state = "not started yet" if has_not_begun(overview) else overview.state.name
            new = [f"{overview.name}: {overview.kind}, {state}, {where}", *new]
            lines.has_begun = True
        stream.writelines(f"{line}\n" for line in new if line not in shown)
        shown.update(new)
        stream.flush()
    print_once(overview, stream)
    return exit_code_of(overview)


def follow_live(reader: Reader, stream: TextIO, interval_s: float, pause: Pause = time.sleep) -> int:
    """Show the overview on the whole terminal until the run ends; then print it below what was there before."""
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream, highlight=False)
    overview = reader.read()
    try:
        with Live(LiveView(overview), console=console, screen=True, auto_refresh=False) as live:
            for overview in _readings(reader, interval_s, pause):
                live.update(LiveView(overview), refresh=True)
    finally:
        # Also after Ctrl-C, so that the last figures stay in the terminal's history.
        print_once(overview, stream)
    return exit_code_of(overview)


def _readings(reader: Reader, interval_s: float, pause: Pause) -> Iterator[Overview]:
    """The run now, and again after every interval, up to the reading that finds its end."""
    while True:
        overview = reader.read()
        yield overview
        if not goes_on(overview):
            return
        pause(interval_s)


class StepLines:
    """One line for each step that ended since the last call. The first call gives the newest step alone."""

    def __init__(self, reader: Reader) -> None:
        self.has_begun = False
        self._history = reader.history
        self._metrics = reader.history.metrics
        self._progress: RunProgress | None = None
        self._next_step = 0

    def new(self, overview: Overview) -> Iterator[str]:
        if self._progress is None:
            self._progress = RunProgress(overview.max_steps)
            self._next_step = max(0, overview.steps_done - 1)
        # A resumed run does some steps again.
        self._next_step = min(self._next_step, overview.steps_done)
        for step in range(self._next_step, overview.steps_done):
            for source in ("orchestrator", self._history.trainer):
                self._progress.take(self._record(source, step))
            yield from (self._progress.line(), *self._progress.part_lines())
        self._next_step = overview.steps_done

    def _record(self, source: str, step: int) -> dict[str, object]:
        """A step's values, as `RunProgress` takes them."""
        names = [name for name in self._metrics.names(source) if name in _IN_A_LINE or name.startswith(PART)]
        values = self._metrics.of_step(step, names, source)
        role = "orchestrator" if source == "orchestrator" else "trainer"
        return {"time": self._metrics.time_s(step, LOSS, source), "source": role, "step": step, **values}


def _eval_lines(overview: Overview) -> Iterator[str]:
    """Environments that an evaluation has finished."""
    for each in overview.progress:
        if each.scores:
            scores = "  ".join(f"{name} {value:.3f}" for name, value in each.scores.items())
            yield f"{each.env}  {each.weights}  {scores}"


def is_live(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can move its cursor."""
    from rich.console import Console

    console = Console(file=stream)
    return console.is_terminal and not console.is_dumb_terminal


def prepared(stream: TextIO) -> TextIO:
    """The stream, which prints `?` for a character that its encoding does not have."""
    if isinstance(stream, type(sys.__stdout__)):
        stream.reconfigure(errors="replace")
    return stream
