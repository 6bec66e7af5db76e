"""The runs of a report, grouped by label: runs with one label are seeds of one line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from medarc_rl.errors import UsageError
from medarc_rl.report.charts import Band, Line, Series
from prime_rl.history.metrics import finite, last_window
from prime_rl.history.run import RunHistory
from prime_rl.utils.errors import UserError

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
    """Raises UsageError with one line for each directory that is no run."""
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
        UsageError: an option is no `RUN=LABEL`, or names no run of the report.
    """
    names = unique_names(runs)
    chosen: dict[int, str] = {}
    for option in labels:
        run, equals, label = option.rpartition("=")
        places = [place for place, each in enumerate(runs) if run in (str(each.paths.root), each.name, names[place])]
        if not equals or not label.strip():
            raise UsageError(f"--label {option!r}: write RUN=LABEL, as in --label {names[0]}=baseline")
        if not places:
            raise UsageError(f"--label {option!r}: no run of this report is called {run!r}; there are {_listed(names)}")
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


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def finals(groups: Sequence[Group], read: Reader) -> Mapping[str, tuple[float, float | None, str] | None]:
    return {group.label: group.final(lambda run: finite(read(run))) for group in groups}
