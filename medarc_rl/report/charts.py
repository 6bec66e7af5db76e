"""Charts, tables and sections of a report as values, and the runs that they show, grouped by label."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from medarc_rl.errors import UsageError
from prime_rl.history.metrics import last_window
from prime_rl.history.run import RunHistory
from prime_rl.utils.errors import UserError

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
    remark: str = ""
    """Sentence on what the lines leave out."""

    @property
    def note(self) -> str:
        """Sentences that explain the bands, and what the lines leave out."""
        bands = dict.fromkeys(line.band.title for line in self.lines if line.band is not None)
        return " ".join(filter(None, (f"Band: {', '.join(bands)}." if bands else "", self.remark)))

    @property
    def summary(self) -> str:
        """Text for screen readers: first and last value of each line."""
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


START_FACTOR = 3.0
"""A first step that takes so many times as long as any other is left out of charts of time."""


def without_start(lines: Sequence[Line], unit: str) -> tuple[list[Line], str]:
    """Lines of seconds or speeds without a first step that would flatten the others, and a sentence that says so.

    The first step compiles, loads and fills caches. Tables count it.
    """
    sums: dict[int, float] = {}
    for line in lines:
        for step, value in line.values.items():
            sums[step] = sums.get(step, 0.0) + value
    known = {step: value for step, value in sums.items() if math.isfinite(value) and value > 0}
    if len(known) < 3:
        return list(lines), ""
    start = min(known)
    others = [value for step, value in known.items() if step != start]
    if known[start] <= START_FACTOR * max(others) and START_FACTOR * known[start] >= min(others):
        return list(lines), ""
    left = [
        Line(each.title, {step: value for step, value in each.values.items() if step != start}, each.band, each.color,
             each.is_dashed)
        for each in lines
    ]  # fmt: skip
    return left, f"Without step {start}, the start: {short(known[start], 3)} {unit}."


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
    """Whether the page gives it a whole row."""


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
    pictures: list[tuple[str, str]] = field(default_factory=list)
    """Small pictures as data URLs, and what is said below each."""

    @property
    def is_empty(self) -> bool:
        return not (self.notes or self.warnings or self.tables or self.charts or self.listings or self.pictures)


# The runs of a report, grouped by label: runs with one label are seeds of one line


Reader = Callable[[RunHistory], Series]


@dataclass(frozen=True, slots=True)
class Group:
    """Runs with the same label."""

    label: str
    runs: Sequence[RunHistory]
    color: int

    def line(self, read: Reader) -> Line:
        """The mean over the runs that have the step, and with several runs the band from the lowest to the highest."""
        each = [series for series in map(read, self.runs) if series]
        if len(each) < 2:
            return Line(self.label, each[0] if each else {}, color=self.color)
        columns = {step: [series[step] for series in each if step in series] for step in sorted(set().union(*each))}
        values = {step: [value for value in found if math.isfinite(value)] for step, found in columns.items()}
        values = {step: found for step, found in values.items() if found}
        band = Band(
            f"lowest to highest of {len(each)} runs",
            {step: min(found) for step, found in values.items()},
            {step: max(found) for step, found in values.items()},
        )
        means = {step: fmean(found) for step, found in values.items()}
        return Line(f"{self.label} (mean of {len(each)})", means, band, self.color)

    def final(self, read: Reader) -> tuple[float, float | None, str] | None:
        """Mean at the end of the runs, its standard error, and what the error is over."""
        windows = [window for run in self.runs if (window := last_window(read(run))) is not None]
        if not windows:
            return None
        means = [window.mean for window in windows]
        if len(means) == 1:
            return means[0], windows[0].standard_error, "steps"
        return fmean(means), stdev(means) / math.sqrt(len(means)), "runs"


def open_runs(directories: Sequence[Path]) -> list[RunHistory]:
    """Open the runs to compare. Raises UsageError with one line for each directory that is not a run."""
    found, faults = [], []
    for directory in directories:
        try:
            found.append(RunHistory.open(directory))
        except UserError as error:
            faults.append(str(error))
        except OSError as error:
            faults.append(f"{directory} cannot be read: {error.strerror}")
    places = [run.paths.root.resolve() for run in found]
    faults += [f"{path} is named twice" for path in dict.fromkeys(places) if places.count(path) > 1]
    if faults:
        raise UsageError(*faults)
    kinds = {run.kind for run in found}
    if len(kinds) > 1:
        listed = ", ".join(f"{run.paths.root} is {run.kind}" for run in found)
        raise UsageError(f"runs of one kind can be compared: {listed}")
    return found


def group_runs(runs: Sequence[RunHistory], labels: Sequence[str]) -> list[Group]:
    """Group runs by `--label RUN=LABEL`, where RUN is a run's directory or its name.

    Raises:
        UsageError: an option is not `RUN=LABEL`, or does not name a run of the report.
    """
    names = unique_names(runs)
    chosen: dict[int, str] = {}
    for option in labels:
        run, equals, label = option.rpartition("=")
        places = [place for place, each in enumerate(runs) if run in (str(each.paths.root), each.name, names[place])]
        if not equals or not label.strip():
            raise UsageError(f"--label {option!r}: write RUN=LABEL, as in --label {names[0]}=baseline")
        if not places:
            raise UsageError(f"--label {option!r}: this report has no run {run!r}; its runs are {', '.join(names)}")
        chosen |= dict.fromkeys(places, label.strip())
    by_label: dict[str, list[RunHistory]] = {}
    for place, each in enumerate(runs):
        by_label.setdefault(chosen.get(place, names[place]), []).append(each)
    return [Group(label, members, color) for color, (label, members) in enumerate(by_label.items())]


def unique_names(runs: Sequence[RunHistory]) -> list[str]:
    """Each run's directory by name, with as many parents as tell the runs apart."""
    paths = [run.paths.root.resolve() for run in runs]
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names
