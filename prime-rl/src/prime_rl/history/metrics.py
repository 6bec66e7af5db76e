"""Reads `OUT/metrics.jsonl`, also while it grows.

Steps are numbered from 0, as in the file. A resumed run writes some steps again. The values of the attempt that it
continues hold up to the step where it started, and its own from there on.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_rl.history.attempts import Attempt

_FIELDS = ("time", "source", "step")
_MAX_STEPS = 2**63
_AFTER_UPDATES = ("eval/", "val/")
"""Prefixes of metrics that belong to the weights after `step` updates, which a resume from `step` does not repeat."""


@dataclass(slots=True)
class _Column:
    """One metric of one source, in the order of the file: 24 bytes a value."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    times_s: array[float] = field(default_factory=lambda: array("d"))

    def cut(self, step: int) -> None:
        """Remove everything from a step on."""
        kept = [index for index, each in enumerate(self.steps) if each < step]
        self.steps = array("q", (self.steps[index] for index in kept))
        self.values = array("d", (self.values[index] for index in kept))
        self.times_s = array("d", (self.times_s[index] for index in kept))


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
        self._partial = b""
        self._attempts = 0

    def refresh(self, attempts: Sequence[Attempt]) -> bool:
        """Read what is new. True if anything was."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._offset:  # a new run has renamed the old file
                    self._begin()
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return False
        self._offset += len(new)
        *lines, self._partial = (self._partial + new).split(b"\n")
        for line in filter(None, lines):
            self._take(line, attempts)
        return bool(lines)

    @property
    def sources(self) -> list[str]:
        return list(self._columns)

    def names(self, source: str) -> list[str]:
        """The metrics of a source, in the order in which they first appeared."""
        return list(self._columns.get(source, {}))

    def series(self, name: str, source: str) -> dict[int, float]:
        """Values by step, ascending. A NaN or an infinity, which the file holds as null, is NaN."""
        column = self._columns.get(source, {}).get(name)
        return {} if column is None else _by_step(column.steps, column.values)

    def times_s(self, name: str, source: str) -> dict[int, float]:
        """When each value was written, in seconds since the epoch, by step."""
        column = self._columns.get(source, {}).get(name)
        return {} if column is None else _by_step(column.steps, column.times_s)

    def last(self, name: str, source: str) -> float | None:
        """The value of the highest step."""
        return next(reversed(self.series(name, source).values()), None)

    def _take(self, line: bytes, attempts: Sequence[Attempt]) -> None:
        try:
            record: Mapping[str, Any] = json.loads(line)
            time_s, source, step = float(record["time"]), str(record["source"]), int(record["step"])
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            self.damaged_lines += 1
            return
        if abs(step) >= _MAX_STEPS:
            self.damaged_lines += 1
            return
        self._begin_attempts(attempts, time_s)
        columns = self._columns.setdefault(source, {})
        for name, value in record.items():
            if name not in _FIELDS and (value is None or isinstance(value, int | float)):
                column = columns.setdefault(name, _Column())
                column.steps.append(step)
                column.values.append(_number(value))
                column.times_s.append(time_s)

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


def _by_step(steps: Iterable[int], values: Iterable[float]) -> dict[int, float]:
    """Of a step that was written twice, the later value holds."""
    found = dict(zip(steps, values, strict=True))
    return {step: found[step] for step in sorted(found)}


def _number(value: float | None) -> float:
    """NaN for null, and for an integer that no float can hold."""
    try:
        return math.nan if value is None else float(value)
    except OverflowError:
        return math.nan
