"""Progress of a run, read from `OUT/metrics.jsonl`, the progress bar of a trainer without a launcher, and safe text."""

from __future__ import annotations

import logging
import re
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from prime_rl.utils.logger import get_logger
from prime_rl.utils.terminal import cut_inside

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_WIDTH = 80
_EDGE_STEPS = 5
"""Number of first and last steps whose mean rewards the summary compares."""
_RATE_STEPS = 10
"""Number of last steps from which the remaining time is estimated."""
_SPARKS = "▁▂▃▄▅▆▇█"
_PART = "reward_parts/"


def clock(seconds: float) -> str:
    """`0:45`, `12:03`, `1:02:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def step_text(done: int, total: int | None) -> str:
    """`step 79 (80/80)`: the last finished step as files and metrics number it, from 0; then how many are finished."""
    finished = f"({done})" if total is None else f"({done}/{total})"
    return f"step {done - 1} {finished}" if done else finished


def sparkline(values: Iterable[float], width: int = 20) -> str:
    """Draw the newest `width` values as blocks of eight heights."""
    shown = list(values)[-width:]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in shown)


class Pace:
    """Estimates the time left from the last steps, so that a resumed run does not look fast."""

    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps
        self._ends: deque[tuple[int, float]] = deque(maxlen=_RATE_STEPS + 1)

    def left_s(self, step: int, now_s: float) -> float | None:
        """Seconds from `now_s`, when `step` steps are done; None if that is unknown."""
        self._ends.append((step, now_s))
        (first_step, first_s), (last_step, last_s) = self._ends[0], self._ends[-1]
        if self.total_steps is None or last_step <= first_step:
            return None
        return max(0, self.total_steps - step) * (last_s - first_s) / (last_step - first_step)


@dataclass(slots=True)
class RunProgress:
    """Values from the metrics so far. A step is counted here by the number of steps finished with it, from 1."""

    max_steps: int | None
    step: int = 0
    """Number of finished steps, those before a resume included."""
    rewards: dict[int, float] = field(default_factory=dict)
    """Mean reward of each step."""
    parts: dict[int, dict[str, float]] = field(default_factory=dict)
    """Mean of each reward function, by step and name. A step lacks those of an environment without rollouts."""
    loss: float | None = None
    tokens_per_s: float | None = None
    steps_this_time: int = 0
    remaining_s: float | None = None
    """Estimated seconds for the remaining steps, at the pace of the last ones."""
    _pace: Pace = field(init=False)
    _part_names: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pace = Pace(self.max_steps)

    def take(self, record: Mapping[str, Any]) -> bool:
        """Read one record of `metrics.jsonl`; True if it finishes a step."""
        step = int(record.get("step", 0)) + 1
        if record.get("source") == "orchestrator" and (reward := record.get("reward/mean")) is not None:
            self.rewards[step] = float(reward)
            self.parts[step] = {
                name.removeprefix(_PART): float(value) for name, value in record.items() if name.startswith(_PART)
            }
            self._part_names |= dict.fromkeys(self.parts[step])
        if record.get("source") != "trainer" or "loss/mean" not in record:
            return False
        self.step = step
        self.steps_this_time += 1
        self.loss = record["loss/mean"]
        self.tokens_per_s = record.get("perf/throughput") or self.tokens_per_s
        self.remaining_s = self._pace.left_s(step, float(record["time"]))
        return True

    @property
    def reward_course(self) -> list[float]:
        """Mean rewards of the finished steps, in order."""
        return [self.rewards[step] for step in sorted(self.rewards) if step <= self.step]

    def figures(self) -> list[str]:
        """Reward, loss, speed and remaining time, if known."""
        figures = []
        if self.step in self.rewards:
            figures.append(f"reward {self.rewards[self.step]:.3f}")
        if self.loss is not None:
            figures.append(f"loss {self.loss:.4f}")
        if self.tokens_per_s:
            figures.append(f"{self.tokens_per_s:.0f} tok/s")
        if self.remaining_s is not None:
            figures.append(f"{clock(self.remaining_s)} left")
        return figures

    def line(self) -> str:
        return "  ".join([step_text(self.step, self.max_steps), *self.figures()])

    @property
    def part_names(self) -> list[str]:
        """Reward functions in the order in which they were first seen. Empty if one function is the whole reward."""
        return list(self._part_names) if len(self._part_names) > 1 else []

    def part_lines(self) -> list[str]:
        """The parts of the last step's reward, in indented lines of at most `LINE_WIDTH` characters."""
        values = self.parts.get(self.step, {})
        words = [f"{name} {values[name]:.3f}" for name in self.part_names if name in values]
        # A figure is not cut off from its name.
        text = "  ".join(word.replace(" ", "\N{NO-BREAK SPACE}") for word in words)
        wrapper = textwrap.TextWrapper(
            LINE_WIDTH, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        lines = wrapper.wrap(text)
        return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]

    def summary(self, elapsed_s: float) -> str:
        """Steps, time and rewards of the run, in one line."""
        steps = f"{self.steps_this_time} step{'s' * (self.steps_this_time != 1)}"
        rewards = self.reward_course
        if not rewards:
            return f"{steps} in {clock(elapsed_s)}"
        if len(rewards) == 1:
            return f"{steps} in {clock(elapsed_s)}, mean reward {rewards[0]:.3f}"
        # Never the same step on both sides.
        count = min(_EDGE_STEPS, len(rewards) // 2)
        change = _change(rewards[:count], rewards[-count:])
        compared = f"first and last {count} steps" if count > 1 else "first and last step"
        summary = f"{steps} in {clock(elapsed_s)}, mean reward {change} ({compared})"
        steps_done = sorted(step for step in self.rewards if step <= self.step)
        changes = []
        for name in self.part_names:
            edges = (steps_done[:count], steps_done[-count:])
            first, last = ([self.parts[step][name] for step in edge if name in self.parts[step]] for edge in edges)
            if first and last:
                changes.append(f"{name} {_change(first, last)}")
        return f"{summary}: {', '.join(changes)}" if changes else summary


def _change(first: Sequence[float], last: Sequence[float]) -> str:
    """Means of the first and the last values."""
    return f"{fmean(first):.3f} -> {fmean(last):.3f}"


# The progress bar.


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


# Text from a run's files, made safe for a terminal and for Markdown.


_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")


def printable(text: str, max_chars: int = 300) -> str:
    """One line without escape sequences and control characters, of bounded length."""
    return visible(cut_inside(text, 4 * max_chars).replace("\t", " ").strip(), max_chars).strip()


def visible(text: str, max_chars: int) -> str:
    """As `printable`, but indentation stays."""
    cut = _ESCAPE.sub("", cut_inside(text, 4 * max_chars)).expandtabs(4)
    line = "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in cut)
    return cut_inside(line, max_chars)


def shown_clock(seconds: float | None) -> str:
    """Local time of day, `15:02:39`; empty for None."""
    import time

    return "" if seconds is None else time.strftime("%H:%M:%S", time.localtime(seconds))


def steps_words(steps: tuple[int, ...], most: int = 3) -> str:
    """`step 10, 20, 30`; of many, the newest: `… 90, 100, 110 (11)`."""
    if not steps:
        return "none"
    listed = ", ".join(map(str, steps[-most:]))
    return f"step {listed}" if len(steps) <= most else f"step …, {listed} ({len(steps)} in all)"
