"""Tables of a report: final values of the runs, evaluations, rows of SFT data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, stdev

from medarc_rl.report.charts import Section, Series, Table, short
from medarc_rl.report.curves import (
    ENTROPY,
    LENGTH,
    LOSS,
    MISMATCH,
    REWARD,
    TRUNCATED,
    VALIDATION,
    evaluation_names,
    evaluation_series,
)
from medarc_rl.report.groups import Group
from medarc_rl.report.overview import duration
from prime_rl.history.metrics import finite
from prime_rl.history.run import RunHistory
from prime_rl.history.spending import Spending

_ROW_COUNTS = {
    "data/seen": "rows read",
    "data/truncated": "cut at the maximum length",
    "data/overlong": "dropped: too long",
    "data/untrainable": "dropped: no token to train on",
    "data/unmaskable": "dropped: the template cannot be masked",
}


def finals_table(groups: Sequence[Group], kind: str) -> Table | None:
    """Means at the end of the runs with standard errors: over runs if a label has several, otherwise over steps."""
    rows = []
    for curve in {"rl": (REWARD, ENTROPY, MISMATCH, LENGTH, TRUNCATED), "sft": (LOSS, VALIDATION)}.get(kind, ()):
        title = f"{curve.title}, {curve.unit}" if curve.unit else curve.title
        rows.append((title, *(_final_cell(group, curve.read) for group in groups)))
    for name in dict.fromkeys(name for group in groups for run in group.runs for name in evaluation_names(run)):
        read = partial(evaluation_series, name=name)
        rows.append((name.removeprefix("eval/"), *(_last_cell(group, read) for group in groups)))
    rows = [row for row in rows if any(cell != "–" for cell in row[1:])]
    if not rows:
        return None
    caption = (
        "Final values: mean over the last tenth of the steps (at least 5) ± standard error, over the runs of a label "
        "if it has several, otherwise over these steps; evaluations: the last one"
    )
    return Table(("", *(group.label for group in groups)), rows, caption)


def _final_cell(group: Group, read: Callable[[RunHistory], Series]) -> str:
    found = group.final(lambda run: finite(read(run)))
    if found is None:
        return "–"
    mean, error, over = found
    runs = f" ({len(group.runs)} runs)" if over == "runs" else ""
    return f"{short(mean)}{f' ± {short(error, 2)}' if error is not None else ''}{runs}"


def _last_cell(group: Group, read: Callable[[RunHistory], Series]) -> str:
    last = [values[max(values)] for run in group.runs if (values := finite(read(run)))]
    if not last:
        return "–"
    if len(last) == 1:
        return short(last[0])
    return f"{short(fmean(last))} ± {short(stdev(last) / len(last) ** 0.5, 2)} ({len(last)} runs)"


def runs_table(groups: Sequence[Group], spendings: dict[int, Sequence[Spending]]) -> Table:
    """Name, state, steps and time of each run of a comparison."""
    rows = []
    for group in groups:
        for run in group.runs:
            spending = spendings[id(run)]
            time = duration(sum(each.seconds for each in spending)) if spending else "–"
            state = run.state()
            steps = f"{run.steps_done:,}" if run.kind != "eval" else "–"
            rows.append((str(run.paths.root), group.label, state.name, steps, time, str(len(run.attempts) or "–")))
    return Table(("run", "label", "state", "steps", "time", "attempts"), rows, "Runs", is_numeric=False)


def evaluation_table(run: RunHistory) -> Table | None:
    """All scores of a run's evaluations by the number of updates."""
    names = list(dict.fromkeys(evaluation_names(run)))
    series = {name: evaluation_series(run, name) for name in names}
    steps = sorted({step for values in series.values() for step in values})
    if not steps:
        return None
    rows = [(str(step), *(short(series[name].get(step)) for name in names)) for step in steps]
    return Table(("updates", *(name.removeprefix("eval/") for name in names)), rows, "Evaluations")


def data_section(groups: Sequence[Group]) -> Section:
    """What became of the rows of SFT's data."""
    section = Section("data", "Data")
    runs = [run for group in groups for run in group.runs if run.kind == "sft"]
    counts = [{name: run.metrics.last(name, run.trainer) for name in _ROW_COUNTS} for run in runs]
    counts = [each for each in counts if each["data/seen"] is not None]
    if not counts:
        if runs:
            section.notes.append("No step has been finished, so no rows have been counted.")
        return section
    rows = []
    for name, title in _ROW_COUNTS.items():
        cells = []
        for each in counts:
            value, seen = each[name], each["data/seen"]
            share = f" ({value / seen:.1%})" if value is not None and seen and name != "data/seen" else ""
            cells.append(f"{short(value)}{share}")
        rows.append((title, *cells))
    headers = ("rows, over all processes", *([run.name for run in runs] if len(runs) > 1 else ["number"]))
    section.tables.append(Table(headers, rows, "What became of the rows"))
    return section
