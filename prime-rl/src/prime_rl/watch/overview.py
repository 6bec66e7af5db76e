"""Draws a run at one moment for any width, and follows it on a terminal, as lines, or as JSON until it ends."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, TextIO

from rich.console import Group, RenderableType
from rich.text import Text

from prime_rl.utils.terminal import shortened
from prime_rl.watch.facts import LOSS, PART, Doing, Figure, Overview, Reader, as_json
from prime_rl.watch.progress import RunProgress, clock, shown_clock, sparkline, steps_words

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

TWO_COLUMNS = 110
"""From this width on, two groups of figures stand next to each other."""
NARROWEST = 30
SPARK_CHARS = 40
BAR_CHARS = 32
_STATES = {"running": "bold green", "complete": "bold green", "stopped": "bold yellow", "unknown": "bold yellow"}
_FAILED = "bold red"
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class _Section:
    """Lines that stay or go together."""

    rank: int
    """If not all sections fit, those of the highest rank go first."""
    lines: Sequence[Text] = field(default_factory=list)


def drawn(overview: Overview, width: int, height: int | None = None) -> RenderableType:
    """The overview in lines of at most `width` characters, and at most `height` of them."""
    width = max(width, NARROWEST)
    sections = [section for section in _sections(overview, width) if section.lines]
    # A blank line stands between two sections.
    while height is not None and len(sections) > 1 and _line_count(sections) > height:
        sections.remove(max(sections, key=lambda section: section.rank))
    lines: list[Text] = []
    for section in sections:
        lines += [Text()] * bool(lines) + list(section.lines)
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
        line.truncate(width, overflow="ellipsis")
    return Group(*lines)


def _line_count(sections: Sequence[_Section]) -> int:
    return sum(len(section.lines) + 1 for section in sections) - 1


def _sections(overview: Overview, width: int) -> Iterable[_Section]:
    yield _Section(0, _head(overview, width))
    learning = _figures([*overview.learning[:1], *_indented(overview.parts), *overview.learning[1:]], "green")
    running = _figures(overview.running, "cyan")
    if width >= TWO_COLUMNS and overview.learning and overview.running:
        yield _Section(1, _side_by_side(learning(width // 2 - 2), running(width - width // 2 - 2), width // 2))
    else:
        yield _Section(1, learning(width))
        yield _Section(4, running(width))
    yield _Section(4, _figures(overview.judges, "yellow")(width))
    yield _Section(3, _figures(overview.evals, "magenta")(width))
    yield _Section(1, _evaluation(overview, width))
    yield _Section(2, _processes(overview))
    yield _Section(6, _gpus(overview))
    yield _Section(3, _notices(overview))
    yield _Section(5, _files(overview))


def _head(overview: Overview, width: int) -> list[Text]:
    state = overview.state
    style = _STATES.get(state.name, _FAILED)
    first = Text.assemble((overview.name, "bold"), "  ", overview.kind, "  ", (state.name, style))
    steps = overview.step_words
    if steps:
        gap = max(2, width - first.cell_len - len(steps))
        first.append(" " * gap).append(steps, style="bold")
    lines = [first]
    if state.detail and not overview.is_running:
        lines += [Text(state.detail, style="red" if style == _FAILED else "yellow")]
    share = overview.share_done
    times = [f"{clock(overview.elapsed_s)} elapsed"] if overview.elapsed_s else []
    if overview.left_s is not None:
        times.append(f"{clock(overview.left_s)} left")
    elif not overview.is_running and state.at_s is not None:
        times.append(f"{'last seen' if state.name in ('killed', 'unknown') else 'ended'} {shown_clock(state.at_s)}")
    if overview.attempt is not None and overview.attempt.number > 1:
        times.append(f"attempt {overview.attempt.number}")
    if overview.holder is not None:
        times.append(f"on {overview.holder.host}")
    words = "  ".join(times)
    if share is not None:
        room = max(8, min(BAR_CHARS, width - len(words) - 7))
        full = round(share * room)
        bar = Text.assemble(("━" * full, "green"), ("─" * (room - full), "dim"), f" {share:4.0%}")
        lines.append(bar.append("  ").append(words, style="dim") if words else bar)
    elif words:
        lines.append(Text(words, style="dim"))
    return lines


def _indented(figures: Sequence[Figure]) -> list[Figure]:
    return [Figure(f"  {each.label}", each.first, each.last, each.course, each.form) for each in figures]


@dataclass(frozen=True, slots=True)
class _figures:
    """Label, first and last value, and the course, one line for each figure."""

    figures: Sequence[Figure]
    style: str

    def __call__(self, width: int) -> list[Text]:
        if not self.figures:
            return []
        firsts = [each.words(each.first) for each in self.figures]
        lasts = [each.words(each.last) for each in self.figures]
        of_first, of_last = max(map(len, firsts)), max(map(len, lasts))
        of_label = min(max(len(each.label) for each in self.figures), max(8, width - of_first - of_last - 8))
        room = min(SPARK_CHARS, width - of_label - of_first - of_last - 8)
        return [
            Text.assemble(
                (f"{shortened(each.label, of_label):<{of_label}}", "bold" if number == 0 else ""),
                (f"  {first:>{of_first}} → ", "dim"),
                (f"{last:>{of_last}}", "bold"),
                "  ",
                (sparkline(_thinned(each.course, room), room) if room >= 6 else "", self.style),
            )
            for number, (each, first, last) in enumerate(zip(self.figures, firsts, lasts, strict=True))
        ]


def _thinned(values: Sequence[float], most: int) -> list[float]:
    """At most `most` means of neighbours, so that a line shows the whole run."""
    finite = [value for value in values if abs(value) < float("inf")]
    if len(finite) <= most or most < 1:
        return finite
    edges = [len(finite) * index // most for index in range(most + 1)]
    return [sum(finite[low:high]) / (high - low) for low, high in pairwise(edges)]


def _side_by_side(left: Sequence[Text], right: Sequence[Text], at: int) -> list[Text]:
    lines = []
    for one, other in zip_longest(left, right, fillvalue=Text()):
        line = one.copy()
        line.append(" " * max(0, at - line.cell_len))
        lines.append(line.append_text(other))
    return lines


def _evaluation(overview: Overview, width: int) -> list[Text]:
    label = max((len(each.env) for each in overview.progress), default=0)
    label = min(label, max(10, width // 3))
    lines = []
    for each in overview.progress:
        total = "" if each.total is None else f"/{each.total:,}"
        scores = "  ".join(f"{name} {value:.3f}" for name, value in each.scores.items())
        line = Text.assemble(
            (f"{shortened(each.env, label):<{label}}", "bold"), f"  {each.weights}  {each.done:,}{total} rollouts"
        )
        lines.append(line.append(f"  {scores}" if scores else "", style="green"))
    if overview.rows:
        lines.append(Text("rows  " + "  ".join(f"{name} {count:,}" for name, count in overview.rows.items())))
    return lines


def _processes(overview: Overview) -> list[Text]:
    """Activity of each process; after a run that did not complete, the last one."""
    if overview.state.name == "complete":
        return []
    name_chars = max((len(each.name) for each in overview.processes), default=0)
    return [_process(each, name_chars, overview.now_s, overview.is_running) for each in overview.processes]


def _process(each: Doing, name_chars: int, now_s: float, is_running: bool) -> Text:
    since = clock(max(0.0, now_s - each.at_s)) if is_running else shown_clock(each.at_s)
    line = Text.assemble((f"{each.name:<{name_chars}}", "cyan"), (f"  {since:>7}  ", "dim"))
    if each.waits_for is not None:
        line.append(f"waits for {each.waits_for}: ", style="yellow")
    return line.append(each.words, style="dim" if each.is_idle else "")


def _gpus(overview: Overview) -> list[Text]:
    return [
        Text(
            f"GPU {each.index}  {each.used_bytes / _GIB:.1f} of {each.total_bytes / _GIB:.0f} GiB"
            + ("" if each.busy_percent is None else f"  {each.busy_percent}% busy")
        )
        for each in overview.gpus
    ]


def _notices(overview: Overview) -> list[Text]:
    return [
        Text.assemble(
            (f"{each.clock} {each.log.stem} ", "dim"),
            (each.level, "yellow" if each.level == "warning" else _FAILED),
            f" {each.words}",
        )
        for each in overview.notices
    ]


def _files(overview: Overview) -> list[Text]:
    if overview.kind == "eval":
        return [Text(str(overview.directory), style="dim")]
    saved = f"checkpoints: {steps_words(overview.checkpoints)}   weights: {steps_words(overview.weights)}"
    return [Text(saved), Text(str(overview.directory), style="dim")]


# Following a run until it ends.


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

        yield drawn(self.overview, options.max_width, max(4, console.size.height - self.height_kept - 1))


def print_once(overview: Overview, stream: TextIO) -> None:
    """Print the overview in full: in colour on a terminal, otherwise plain at `PLAIN_WIDTH`."""
    from rich.console import Console

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
