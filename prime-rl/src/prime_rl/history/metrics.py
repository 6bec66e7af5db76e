"""Reads `OUT/metrics.jsonl`, also while it grows.

Steps are numbered from 0, as in the file. A resumed run writes some steps again. The values of the attempt that it
continues hold up to the step where it started, and its own from there on.

The values of an evaluation have the policy version that was evaluated in place of the step: RL writes those of version
4 before the batch of step 5, say.
"""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from prime_rl.history.attempts import Attempt

_FIELDS = ("time", "source", "step")
_MAX_STEPS = 2**63
_MAX_TIME_S = 253_402_300_800
"""The year 10,000, which no date of Python reaches."""
_COURSE_VALUES = 2048
_HEAD_BYTES = 256
"""Enough of a file's beginning to tell it from another run's: the first line starts with its time."""
_BLOCK_BYTES = 2**22
"""Read at once: a file of a long run has gigabytes."""
_EVALUATION = "eval/"
_VERSION = "progress/ckpt_step"
_AFTER_UPDATES = (_EVALUATION, "val/")
"""Prefixes of metrics that belong to the weights after `step` updates, which a resume from `step` does not repeat."""


@dataclass(slots=True)
class _Column:
    """One metric of one source, in the order of the file: 24 bytes a value."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    times_s: array[float] = field(default_factory=lambda: array("d"))
    is_ascending: bool = True
    """Whether each step is above the one before it, as nearly always: then nothing needs sorting."""

    def append(self, step: int, value: float, time_s: float) -> None:
        self.is_ascending = self.is_ascending and (not self.steps or step > self.steps[-1])
        self.steps.append(step)
        self.values.append(value)
        self.times_s.append(time_s)

    def by_step(self, values: array[float]) -> dict[int, float]:
        """Values or times, ascending. Of a step that was written twice, the later value holds."""
        found = dict(zip(self.steps, values, strict=True))
        return found if self.is_ascending else {step: found[step] for step in sorted(found)}

    def newest(self, values: array[float], count: int) -> dict[int, float]:
        """Values or times of the highest steps, ascending."""
        if self.is_ascending:
            return dict(zip(self.steps[-count:], values[-count:], strict=True))
        return dict(list(self.by_step(values).items())[-count:])

    def at(self, step: int, values: array[float]) -> float | None:
        if not self.is_ascending:
            return self.by_step(values).get(step)
        index = bisect_left(self.steps, step)
        return values[index] if index < len(self.steps) and self.steps[index] == step else None

    def cut(self, step: int) -> None:
        """Remove everything from a step on."""
        kept = [index for index, each in enumerate(self.steps) if each < step]
        self.steps = array("q", (self.steps[index] for index in kept))
        self.values = array("d", (self.values[index] for index in kept))
        self.times_s = array("d", (self.times_s[index] for index in kept))
        self.is_ascending = all(one < next_one for one, next_one in pairwise(self.steps))


class MetricLog:
    """The metrics of a run, by source (`trainer`, `orchestrator`, …) and name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin()

    def _begin(self) -> None:
        self.damaged_lines = 0
        """Lines that are no JSON object with a source and a step, as a full disk leaves them."""
        self._columns: dict[str, dict[str, _Column]] = {}
        self._offset = 0
        self._head = b""
        self._partial = b""
        self._attempts = 0

    def refresh(self, attempts: Sequence[Attempt]) -> bool:
        """Read what is new. True if anything was."""
        lines = 0
        try:
            with self.path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
                if not head.startswith(self._head) or file.seek(0, 2) < self._offset:  # the file of another run
                    self._begin()
                self._head = head
                file.seek(self._offset)
                while block := file.read(_BLOCK_BYTES):
                    self._offset += len(block)
                    *whole, self._partial = (self._partial + block).split(b"\n")
                    for line in filter(None, whole):
                        self._take(line, attempts)
                    lines += len(whole)
        except FileNotFoundError:
            return False
        return lines > 0

    @property
    def sources(self) -> list[str]:
        return list(self._columns)

    def names(self, source: str) -> list[str]:
        """The metrics of a source, in the order in which they first appeared."""
        return list(self._columns.get(source, {}))

    def series(self, name: str, source: str) -> dict[int, float]:
        """Values by step, ascending. A NaN or an infinity, which the file holds as null, is NaN."""
        column = self._columns.get(source, {}).get(name)
        return {} if column is None else column.by_step(column.values)

    def times_s(self, name: str, source: str) -> dict[int, float]:
        """When each value was written, in seconds since the epoch, by step."""
        column = self._columns.get(source, {}).get(name)
        return {} if column is None else column.by_step(column.times_s)

    def last(self, name: str, source: str) -> float | None:
        """The value of the highest step."""
        return next(iter(self.newest(name, source, 1).values()), None)

    def newest(self, name: str, source: str, count: int) -> dict[int, float]:
        """Values of the `count` highest steps, ascending. Unlike `series`, no slower for a long run."""
        column = self._columns.get(source, {}).get(name)
        return {} if column is None else column.newest(column.values, count)

    def newest_times_s(self, name: str, source: str, count: int) -> dict[int, float]:
        """When they were written."""
        column = self._columns.get(source, {}).get(name)
        return {} if column is None else column.newest(column.times_s, count)

    def course(self, name: str, source: str) -> list[float]:
        """Values by step for a small picture: the first, the last, and at most `_COURSE_VALUES` in between."""
        column = self._columns.get(source, {}).get(name)
        if column is None:
            return []
        values = column.values if column.is_ascending else array("d", column.by_step(column.values).values())
        stride = max(1, len(values) // _COURSE_VALUES)
        # From the end, so that the last value is one of them.
        return [*values[:1], *values[:0:-stride][::-1]]

    def of_step(self, step: int, names: Sequence[str], source: str) -> dict[str, float]:
        """Values of the metrics that the step has."""
        columns = self._columns.get(source, {})
        found = {name: columns[name].at(step, columns[name].values) for name in names if name in columns}
        return {name: value for name, value in found.items() if value is not None}

    def time_s(self, step: int, name: str, source: str) -> float:
        """When the value of a step was written; 0 without one."""
        column = self._columns.get(source, {}).get(name)
        return 0.0 if column is None else column.at(step, column.times_s) or 0.0

    def _take(self, line: bytes, attempts: Sequence[Attempt]) -> None:
        try:
            record: Mapping[str, Any] = json.loads(line)
            time_s, source, step = float(record["time"]), str(record["source"]), int(record["step"])
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            self.damaged_lines += 1
            return
        if abs(step) >= _MAX_STEPS or not 0 <= time_s < _MAX_TIME_S:
            self.damaged_lines += 1
            return
        self._begin_attempts(attempts, time_s)
        columns = self._columns.setdefault(source, {})
        version = record.get(_VERSION)
        evaluated = version if type(version) is int and abs(version) < _MAX_STEPS else step
        for name, value in record.items():
            if name not in _FIELDS and (value is None or isinstance(value, int | float)):
                column = columns.setdefault(name, _Column())
                column.append(evaluated if name.startswith(_EVALUATION) else step, _number(value), time_s)

    def _begin_attempts(self, attempts: Sequence[Attempt], time_s: float) -> None:
        """Forget what the attempts that had begun by `time_s` were to do again."""
        while self._attempts < len(attempts) and attempts[self._attempts].started_s <= time_s:
            start = attempts[self._attempts].step
            self._attempts += 1
            if start is None:
                continue
            for name, column in self._named_columns():
                column.cut(start + 1 if name.startswith(_AFTER_UPDATES) else start)

    def _named_columns(self) -> Iterable[tuple[str, _Column]]:
        return [each for columns in self._columns.values() for each in columns.items()]


def _number(value: float | None) -> float:
    """NaN for null and an infinity, and for an integer that no float can hold."""
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


# Trends: whether a metric rose or fell over the steps of a run, or did neither.


Z_LIMIT = 2.58
"""A trend counts if the Mann-Kendall statistic is beyond this: by chance, 1 in 100 series without a trend."""
MIN_VALUES = 6
"""With fewer values, no order of them is beyond `Z_LIMIT`."""
MAX_VALUES = 200
"""Longer series are tested on the means of this many stretches."""
END_SHARE = 0.1
MIN_END_STEPS = 5


@dataclass(frozen=True, slots=True)
class Window:
    """Values of consecutive steps."""

    first_step: int
    last_step: int
    mean: float
    standard_error: float | None
    """Standard error of the mean over the steps. None for a single step."""


@dataclass(frozen=True, slots=True)
class Trend:
    """Change of a metric from the first steps of a run to the last ones."""

    first: Window
    last: Window
    z: float
    """Mann-Kendall statistic of all steps; about standard normal if the values have no trend."""
    count: int
    """Number of finite values."""

    @property
    def change(self) -> float:
        return self.last.mean - self.first.mean

    @property
    def direction(self) -> Literal["rose", "fell", "no trend"]:
        if abs(self.z) < Z_LIMIT:
            return "no trend"
        return "rose" if self.z > 0 else "fell"


def finite(series: Mapping[int, float]) -> dict[int, float]:
    return {step: value for step, value in series.items() if math.isfinite(value)}


def end_steps(count: int) -> int:
    """Number of steps that a mean over the end of a run takes: a tenth, at least 5, at most half."""
    return max(1, min(max(MIN_END_STEPS, round(END_SHARE * count)), count // 2))


def window(series: Mapping[int, float], steps: Sequence[int]) -> Window:
    values = [series[step] for step in steps]
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Window(steps[0], steps[-1], fmean(values), error)


def last_window(series: Mapping[int, float]) -> Window | None:
    """The end of a series; None if it is empty."""
    whole = finite(series)
    steps = sorted(whole)
    return window(whole, steps[-end_steps(len(steps)) :]) if steps else None


def trend(series: Mapping[int, float]) -> Trend | None:
    """None if there are fewer than two finite values."""
    whole = finite(series)
    steps = sorted(whole)
    if len(steps) < 2:
        return None
    count = end_steps(len(steps))
    z = mann_kendall([whole[step] for step in steps])
    return Trend(window(whole, steps[:count]), window(whole, steps[-count:]), z, len(steps))


def mann_kendall(values: Sequence[float]) -> float:
    """The Mann-Kendall statistic of a series, corrected for ties and continuity (Kendall, 1975). 0 for few values."""
    values = _stretch_means(values)
    count = len(values)
    if count < MIN_VALUES:
        return 0.0
    score = sum(
        (later > earlier) - (later < earlier) for place, earlier in enumerate(values) for later in values[place + 1 :]
    )
    ties = [values.count(value) for value in set(values)]
    variance = (count * (count - 1) * (2 * count + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    if score == 0 or variance <= 0:
        return 0.0
    return (score - math.copysign(1, score)) / math.sqrt(variance)


def _stretch_means(values: Sequence[float]) -> list[float]:
    if len(values) <= MAX_VALUES:
        return list(values)
    bounds = [round(place * len(values) / MAX_VALUES) for place in range(MAX_VALUES + 1)]
    return [fmean(values[start:end]) for start, end in pairwise(bounds)]
