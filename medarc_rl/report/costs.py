"""Throughput, where the time went, GPU-hours and money, memory, judges."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from medarc_rl.report.charts import Chart, Line, Section, Table, chart_of, short
from medarc_rl.report.curves import MEMORY, SPEED_CURVES, curve_chart
from medarc_rl.report.groups import Group
from medarc_rl.report.overview import duration, gpu_hours
from prime_rl.history.metrics import finite
from prime_rl.history.run import RunHistory
from prime_rl.history.spending import SFT, Phases, Spending, phases_of, split_hint

_JUDGE_CALLS = re.compile("judge/([^/]+)/calls")
_JUDGE_COLUMNS = ("calls", "from the cache", "failed", "retries", "prompt tokens", "answer tokens", "cost", "time")
_SUMMED = ("failed_calls", "retries", "prompt_tokens", "completion_tokens", "cost")
"""Metrics of a judge that are summed over the steps."""
Spendings = Mapping[int, Sequence[Spending]]
"""By `id` of the run."""


def costs_section(groups: Sequence[Group], spendings: Spendings, price: float | None) -> Section:
    section = Section("costs", "Speed, time and cost")
    runs = [run for group in groups for run in group.runs]
    is_single = len(runs) == 1
    phases = [phases_of(run) for run in runs]
    for run, of_run in zip(runs, phases, strict=True):
        if (hint := split_hint(of_run, is_on_cpu=not any(each.gpus for each in run.attempts))) is not None:
            section.notes.append(hint if is_single else f"{run.name}: {hint}")
    if is_single:
        section.tables += [_phase_table(each) for each in phases[0]]
        section.charts += [chart for each in phases[0] for chart in _phase_chart(each)]
    else:
        section.tables += _phase_tables([run.name for run in runs], phases)
    section.charts += [chart for curve in (*SPEED_CURVES, MEMORY) for chart in curve_chart(groups, curve)]
    section.tables += [*ledger_tables(runs, spendings, price), *_judges_table(runs)]
    if is_single:
        section.charts += [
            chart for source, judge in _judges_of(runs[0]) for chart in _judge_charts(runs[0], source, judge)
        ]
    if not any(spendings.values()):
        section.notes.append("The run has no receipts of attempts, so its time and its GPU-hours are not known.")
    return section


def _phase_table(phases: Phases) -> Table:
    whole = phases.total_s
    totals = sorted(phases.totals_s.items(), key=lambda item: -item[1])
    rows = [(title, duration(s), f"{s / phases.steps:,.2f} s", f"{s / whole:.1%}") for title, s in totals]
    return Table(("phase", "sum", "per step", "share"), rows, f"{_name(phases)}: {duration(whole)} in steps")


def _phase_tables(names: Sequence[str], phases: Sequence[Sequence[Phases]]) -> list[Table]:
    """To compare runs: seconds per step of each phase, one table for each process."""
    tables = []
    for source in dict.fromkeys(each.source for of_run in phases for each in of_run):
        of_source = [next((each for each in of_run if each.source == source), None) for of_run in phases]
        titles = dict.fromkeys(title for each in of_source if each is not None for title in each.by_title)
        rows = [(title, *(_phase_cell(each, title) for each in of_source)) for title in titles]
        caption = (
            f"{next(_name(each) for each in of_source if each is not None)}: seconds per step and share of its time"
        )
        tables.append(Table(("phase", *names), rows, caption))
    return tables


def _phase_cell(phases: Phases | None, title: str) -> str:
    seconds = None if phases is None else phases.totals_s.get(title)
    if phases is None or seconds is None:
        return "–"
    return f"{seconds / phases.steps:,.2f} ({seconds / phases.total_s:.0%})"


def _name(phases: Phases) -> str:
    return "trainer" if phases.source == SFT else phases.source


def _phase_chart(phases: Phases) -> list[Chart]:
    lines = [Line(title, values, color=color) for color, (title, values) in enumerate(phases.by_title.items())]
    title = f"Where the {_name(phases)}'s time goes"
    return chart_of(f"phases-{phases.source}", title, lines, unit="s per step", is_stacked=True)


def ledger_tables(runs: Sequence[RunHistory], spendings: Spendings, price: float | None) -> list[Table]:
    """GPU-hours of each attempt and process. Without GPUs in any receipt, only the time."""
    rows = []
    known = [each for run in runs for each in spendings[id(run)]]
    used = {process: hours for each in known for process, hours in (each.gpu_hours or {}).items() if hours}
    processes = list(used)
    for run in runs:
        for each in spendings[id(run)]:
            rows.append((_attempt_name(run, each, runs), *_ledger_cells(each, processes, price)))
        if len(spendings[id(run)]) > 1:
            rows.append(_sum_row(run, spendings[id(run)], processes, price, len(runs) > 1))
    if not rows:
        return []
    gpu_columns = (*(f"{process}, GPU-h" for process in processes), "GPU-hours") if processes else ()
    money = ("USD",) if price is not None and processes else ()
    headers = ("attempt", "time", "start-up", *gpu_columns, *money)
    is_known = any(each.gpu_hours is not None for each in known)
    note = "" if processes else "; no GPU was used" if is_known else "; the receipts name no GPUs"
    return [Table(headers, rows, f"Ledger{note}. Time in a queue before the start is not recorded", is_wide=True)]


def _attempt_name(run: RunHistory, each: Spending, runs: Sequence[RunHistory]) -> str:
    return f"{run.name}, {each.attempt.number}" if len(runs) > 1 else str(each.attempt.number)


def _ledger_cells(each: Spending, processes: Sequence[str], price: float | None) -> list[str]:
    hours, whole = each.gpu_hours, each.all_gpu_hours
    startup = "–" if each.startup_s is None else duration(each.startup_s)
    cells = [duration(each.seconds), startup]
    if processes:
        cells += ["–" if hours is None else short(hours.get(process, 0.0), 3) for process in processes]
        cells.append("–" if whole is None else short(whole, 3))
        if price is not None:
            cells.append("–" if whole is None else f"{price * whole:,.2f}")
    return cells


def _sum_row(
    run: RunHistory, spending: Sequence[Spending], processes: Sequence[str], price: float | None, several: bool
) -> tuple[str, ...]:
    title = f"{run.name}, all" if several else "all"
    cells = [title, duration(sum(each.seconds for each in spending)), ""]
    if processes:
        known = [each.gpu_hours or {} for each in spending]
        cells += [short(sum(hours.get(process, 0.0) for hours in known), 3) for process in processes]
        whole = gpu_hours(spending) or 0.0
        cells.append(short(whole, 3))
        if price is not None:
            cells.append(f"{price * whole:,.2f}")
    return tuple(cells)


def _judges_table(runs: Sequence[RunHistory]) -> list[Table]:
    """A row for each judge of each run, with sums over the steps."""
    found = [(run, source, name) for run in runs for source, name in _judges_of(run)]
    rows = [
        (name if len(runs) == 1 else f"{run.name}, {name}", *_judge_cells(run, source, name))
        for run, source, name in found
    ]
    caption = (
        "Judges: sums over the steps. Cost: in the currency of prompt_price and completion_price. Time: of all calls "
        "to the server one after another, with retries; many run at once"
    )
    return [Table(("judge", *_JUDGE_COLUMNS), rows, caption, is_wide=True)] if rows else []


def _judges_of(run: RunHistory) -> list[tuple[str, str]]:
    """The process that reports a judge, and the judge's name."""
    metrics = run.metrics
    return [
        (source, match[1])
        for source in metrics.sources
        for name in metrics.names(source)
        if (match := _JUDGE_CALLS.fullmatch(name))
    ]


def _judge_cells(run: RunHistory, source: str, judge: str) -> list[str]:
    sums = {name: _sum(run, source, f"judge/{judge}/{name}") for name in _SUMMED}
    calls, cached = _of_calls(run, source, judge, "calls"), _of_calls(run, source, judge, "cache_hit_rate")
    hits = sum(cached.get(step, 0.0) * count for step, count in calls.items())
    seconds = _of_calls(run, source, judge, "latency_s")
    asked = {step: count * (1 - cached.get(step, 0.0)) for step, count in calls.items()}
    counts = [f"{sums[name]:,.0f}" for name in ("failed_calls", "retries", "prompt_tokens", "completion_tokens")]
    cost = short(sums["cost"], 4) if sums["cost"] else "–"
    total = sum(calls.values())
    time_s = sum(each * asked.get(step, 0.0) for step, each in seconds.items())
    return [f"{total:,.0f}", f"{hits / total:.1%}" if total else "–", *counts, cost, duration(time_s)]


def _of_calls(run: RunHistory, source: str, judge: str, name: str) -> dict[int, float]:
    return dict(finite(run.metrics.series(f"judge/{judge}/{name}", source)))


def _sum(run: RunHistory, source: str, name: str) -> float:
    return sum(finite(run.metrics.series(name, source)).values())


def _judge_charts(run: RunHistory, source: str, judge: str) -> list[Chart]:
    calls, cached = _of_calls(run, source, judge, "calls"), _of_calls(run, source, judge, "cache_hit_rate")
    hits = {step: count * cached.get(step, 0.0) for step, count in calls.items()}
    lines = [Line("calls", calls), Line("from the cache", hits, color=1)]
    charts = chart_of(f"judge-calls-{judge}", f"Judge {judge}: calls", lines)
    seconds = [Line("seconds", _of_calls(run, source, judge, "latency_s"), color=2)]
    return charts + chart_of(f"judge-latency-{judge}", f"Judge {judge}: a call to its server", seconds, unit="s")
