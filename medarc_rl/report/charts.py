"""Charts as values: the page draws them with ECharts, pictures with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

MAX_POINTS = 600
"""Longer lines are drawn as the means of this many stretches of steps."""
Series = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Band:
    """A range around a line."""

    title: str
    low: Series
    high: Series


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart."""

    title: str
    values: Series
    band: Band | None = None
    color: int = 0
    """Number of the colour in the theme's palette."""
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over steps. `is_stacked` draws areas that add up."""

    key: str
    title: str
    lines: Sequence[Line]
    unit: str = ""
    is_stacked: bool = False
    x_title: str = "step"

    @property
    def note(self) -> str:
        """What its bands are."""
        bands = dict.fromkeys(line.band.title for line in self.lines if line.band is not None)
        return f"Band: {', '.join(bands)}." if bands else ""

    @property
    def summary(self) -> str:
        """What a screen reader says."""
        parts = []
        for line in self.lines:
            shown = {step: value for step, value in line.values.items() if math.isfinite(value)}
            if shown:
                first, last = min(shown), max(shown)
                at = f"{self.x_title} {first}: {short(shown[first])}, {self.x_title} {last}: {short(shown[last])}"
                parts.append(f"{line.title}, {at}")
        return f"{self.title}{f' ({self.unit})' if self.unit else ''}. {'; '.join(parts)}"

    def as_json(self) -> dict[str, Any]:
        """For `charts.js`. A value that is not finite is a gap."""
        lines = [each for each in map(_thinned, self.lines) if each.values]
        return {
            "title": self.title,
            "unit": self.unit,
            "x": self.x_title,
            "stacked": self.is_stacked,
            "lines": [_line_json(line) for line in lines],
        }

    @property
    def thinned_to(self) -> int | None:
        """Number of steps in a point of the drawn lines, if it is more than one."""
        longest = max((len(line.values) for line in self.lines), default=0)
        return math.ceil(longest / MAX_POINTS) if longest > MAX_POINTS else None


def chart_of(key: str, title: str, lines: Sequence[Line], **more: Any) -> list[Chart]:
    """A chart of the lines that have finite values; none if there are no such lines."""
    drawn = [line for line in lines if any(map(math.isfinite, line.values.values()))]
    return [Chart(key, title, drawn, **more)] if drawn else []


def short(value: float | None, digits: int = 4) -> str:
    """A number for people: at most four significant digits, thousands separated."""
    if value is None or not math.isfinite(value):
        return "–" if value is None else str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def thinned(values: Series, limit: int = MAX_POINTS) -> dict[int, float]:
    """At most `limit` points: the mean of each stretch, at its middle step."""
    steps = sorted(values)
    if len(steps) <= limit:
        return {step: values[step] for step in steps}
    size = math.ceil(len(steps) / limit)
    found = {}
    for start in range(0, len(steps), size):
        stretch = steps[start : start + size]
        numbers = [values[step] for step in stretch if math.isfinite(values[step])]
        found[stretch[len(stretch) // 2]] = fmean(numbers) if numbers else math.nan
    return found


def _thinned(line: Line) -> Line:
    band = line.band
    if band is not None:
        band = Band(band.title, thinned(band.low), thinned(band.high))
    return Line(line.title, thinned(line.values), band, line.color, line.is_dashed)


def _line_json(line: Line) -> dict[str, Any]:
    points = [[step, _plain(value)] for step, value in line.values.items()]
    found: dict[str, Any] = {"title": line.title, "points": points, "color": line.color, "dashed": line.is_dashed}
    if line.band is not None:
        low, high = line.band.low, line.band.high
        rows = [[step, _plain(low[step]), _plain(high[step])] for step in low if step in high]
        found["band"] = {"title": line.band.title, "rows": rows}
    return found


def _plain(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. The first column names the row."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    is_numeric: bool = True
    """Whether all columns but the first hold numbers."""
    is_wide: bool = False
    """Whether it stands in a row of its own."""


@dataclass(slots=True)
class Section:
    """A part of the page: sentences, tables and charts, in this order."""

    key: str
    title: str
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    listings: list[tuple[str, str]] = field(default_factory=list)
    """Titles and texts of several lines, folded."""

    @property
    def is_empty(self) -> bool:
        return not (self.notes or self.warnings or self.tables or self.charts or self.listings)
