"""Facts of runs that are not curves: headline, machines, attempts, settings, time and cost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from medarc_rl.errors import UsageError
from medarc_rl.explain.origins import OURS, Explained, Setting
from medarc_rl.explain.screen import differences
from medarc_rl.explain.sources import NAME as ORIGINS
from medarc_rl.explain.sources import Source
from medarc_rl.report.charts import Chart, Group, Line, Section, Series, Table, chart_of, short, without_start
from medarc_rl.report.curves import (
    ACCURACY,
    LOSS,
    MEMORY,
    REWARD,
    SPEED_CURVES,
    VALIDATION,
    VALIDATION_ACCURACY,
    curve_chart,
    evaluation_names,
    evaluation_series,
)
from prime_rl.history.metrics import finite, trend
from prime_rl.history.run import SFT, Phases, RunHistory, Spending, phases_of, split_hint
from prime_rl.utils.errors import one_line
from prime_rl.utils.logger import count_of
from prime_rl.utils.pydantic_config import ConfigError
from prime_rl.utils.pydantic_config.describe import value_text
from prime_rl.utils.tables import leaves
from prime_rl.utils.terminal import cut_inside, shortened

# The top of the page: tiles for one run, a table for several


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure of the headline."""

    title: str
    value: str
    detail: str = ""
    state: str = ""
    """Name of a run's state, which gives the tile its mark."""


def tiles(run: RunHistory, spending: Sequence[Spending], price: float | None) -> list[Tile]:
    """The headline of one run."""
    found = [_state(run), _steps(run)]
    if run.kind == "rl":
        found += _change("Reward", run, REWARD.read(run))
    elif run.kind == "sft":
        found += _change("Loss", run, LOSS.read(run))
        found += _ends("Validation loss", VALIDATION.read(run))
        found += _ends("Pairs in order", VALIDATION_ACCURACY.read(run) or ACCURACY.read(run), ACCURACY.unit)
    else:
        found += _scores(run)
    seconds = sum(each.seconds for each in spending)
    if spending:
        several = f"in {len(spending)} attempts" if len(spending) > 1 else ""
        found.append(Tile("Time", duration(seconds), several))
    if (tokens := tokens_of(run)) is not None:
        found.append(
            Tile("Tokens", _count(tokens), "trained on, prompts included" if run.kind == "rl" else "trained on")
        )
    return [*found, *cost_tiles(spending, price)]


def cost_tiles(spending: Sequence[Spending], price: float | None) -> list[Tile]:
    hours = gpu_hours(spending)
    if hours is None:
        return []
    cost = f"{hours * price:,.2f} USD at {price:g} USD per GPU-hour" if price is not None else ""
    return [Tile("GPU-hours", f"{hours:,.2f}", cost or ("no GPU was used" if not hours else ""))]


def gpu_hours(spending: Sequence[Spending]) -> float | None:
    """Sum over attempts. None if no attempt names its GPUs."""
    known = [hours for each in spending if (hours := each.all_gpu_hours) is not None]
    return sum(known) if known else None


def tokens_of(run: RunHistory) -> float | None:
    names = {"rl": ("progress/total_tokens", "orchestrator"), "sft": ("progress/num_tokens", run.trainer)}
    return run.metrics.last(*names[run.kind]) if run.kind in names else None


def _state(run: RunHistory) -> Tile:
    state = run.state()
    # Who runs it says since when.
    at = moment(state.at_s) if state.at_s is not None and state.name != "running" else ""
    detail = "; ".join(filter(None, (state.detail, at)))
    return Tile("State", state.name, detail, state.name)


def _steps(run: RunHistory) -> Tile:
    if run.kind == "eval":
        names = set(evaluation_names(run))
        candidates = {step for name in names for step in evaluation_series(run, name)}
        environments = {name.rpartition("/")[0] for name in names}
        return Tile(
            "Evaluated",
            counted(len(candidates), "set of weights", "sets of weights"),
            counted(len(environments), "environment"),
        )
    done, planned = run.steps_done, run.max_steps
    passes = run.metrics.last("progress/epoch", run.trainer) if run.kind == "sft" else None
    complete = f"; {counted(int(passes), 'complete pass', 'complete passes')} over the data" if passes else ""
    steps = f"{done:,}" + (f" of {planned:,}" if planned is not None else "")
    return Tile("Steps", steps, f"numbered from 0{complete}")


def _change(title: str, run: RunHistory, series: object) -> list[Tile]:
    found = trend(series)  # type: ignore[arg-type]
    if found is None:
        return []
    steps = found.first.last_step - found.first.first_step + 1
    over = f"means of the first and last {steps} steps" if steps > 1 else "first and last value"
    return [Tile(title, f"{short(found.first.mean, 3)} → {short(found.last.mean, 3)}", over)]


def _ends(title: str, series: Series, unit: str = "") -> list[Tile]:
    """First and last value of what a run measures a few times: a mean of several would hide how far it got."""
    values = finite(series)
    if not values:
        return []
    first, last = min(values), max(values)
    if first == last:
        return [Tile(title, f"{short(values[last], 3)}{unit}", f"at step {last}")]
    shown = f"{short(values[first], 3)}{unit} → {short(values[last], 3)}{unit}"
    return [Tile(title, shown, f"at steps {first} and {last}")]


def _scores(run: RunHistory) -> list[Tile]:
    found = []
    for name in evaluation_names(run):
        series = evaluation_series(run, name)
        if "/avg@" in name and series:
            first, last = series[min(series)], series[max(series)]
            steps = str(min(series)) if len(series) == 1 else f"{min(series)} to {max(series)}"
            shown = short(last, 3) if len(series) == 1 else f"{short(first, 3)} → {short(last, 3)}"
            found.append(Tile(name.removeprefix("eval/"), shown, f"after {steps} updates"))
    return found[:4]


def counted(count: int, singular: str, plural: str = "") -> str:
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {whole % 60:02} s"


def moment(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _count(value: float) -> str:
    for limit, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.3g}{letter}"
    return f"{value:,.0f}"


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


# Machine and versions, attempts, warnings of the logs


MAX_LOG_BYTES = 8 * 2**20
"""Warnings are searched in the last bytes of a log."""
MAX_WARNINGS = 40
_WARNING = re.compile(r"\b(WARNING|ERROR|CRITICAL|FATAL|stalled|Traceback)\b|\bwarning:|\berror:")


def machine_tables(runs: Sequence[RunHistory]) -> list[Table]:
    """Machine and versions of the newest attempt of each run that recorded them."""
    columns = [(run.name, run.attempts[-1].machine) for run in runs if run.attempts and run.attempts[-1].machine]
    facts = [dict(_machine_rows(machine)) for _, machine in columns if machine is not None]
    names = dict.fromkeys(name for each in facts for name in each)
    if not names:
        return []
    rows = [(name, *(each.get(name, "–") for each in facts)) for name in names]
    headers = ("machine and versions", *(name for name, _ in columns)) if len(columns) > 1 else ("", "newest attempt")
    return [Table(headers, rows, "Machine and versions", is_numeric=False)]


def _machine_rows(machine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    gib = machine.get("memory_bytes")
    cores, usable = machine.get("cpu_count", "?"), machine.get("usable_cpus")
    kept = f", {usable} usable" if usable not in (None, cores) else ""
    yield "processor", f"{machine.get('cpu', '?')}, {cores} cores{kept}"
    if isinstance(gib, int | float):
        yield "memory", f"{gib / 2**30:,.0f} GiB"
    gpus = machine.get("gpus")
    if isinstance(gpus, list):
        kinds = {str(name): gpus.count(name) for name in gpus}
        yield "GPUs", ", ".join(f"{count} × {name}" for name, count in kinds.items()) or "none"
    if (python := machine.get("python")) is not None:
        yield "Python", str(python)
    packages = machine.get("packages")
    for name, version in packages.items() if isinstance(packages, dict) else ():
        yield str(name), str(version)
    if isinstance(git := machine.get("git"), dict):
        changed = ", with uncommitted changes" if git.get("is_changed") else ", clean"
        yield "git commit", f"{git.get('commit', '?')}{changed}"


def attempts_section(run: RunHistory, spending: Sequence[Spending]) -> Section:
    """Attempts with their ends, and warnings of the logs."""
    section = Section("attempts", "Attempts and warnings")
    rows = []
    for each in spending:
        attempt = each.attempt
        git = attempt.machine.get("git") if attempt.machine else None
        end = attempt.result or ("running" if run.state().name == "running" else "no end recorded")
        message = "" if attempt.message in ("", attempt.result) else attempt.message
        rows.append(
            (
                str(attempt.number),
                moment(attempt.started_s),
                "the start" if attempt.step is None else f"step {attempt.step}",
                duration(each.seconds),
                ": ".join(filter(None, (end, message))),
                attempt.host,
                attempt.slurm_job or "–",
                str(git.get("commit", "–")) if isinstance(git, dict) else "–",
            )
        )
    if rows:
        headers = ("attempt", "started", "from", "time", "end", "machine", "Slurm job", "commit")
        section.tables.append(Table(headers, rows, "Attempts", is_numeric=False))
    else:
        section.notes.append("The run has no receipts of attempts, so restarts are not known.")
    if run.metrics.damaged_lines:
        section.warnings.append(f"Left out {count_of('damaged line', run.metrics.damaged_lines)} of metrics.jsonl.")
    lines = list(log_warnings(run))
    if lines:
        section.listings.append((f"Warnings in the logs: the last {len(lines)}", "\n".join(lines)))
    elif run.paths.logs.is_dir():
        section.notes.append("The logs contain no warnings.")
    return section


def log_warnings(run: RunHistory) -> list[str]:
    """The newest lines of a run's logs that warn of something, after the log's name. A repeated line comes once."""
    found: dict[str, None] = {}
    for file in sorted([*run.paths.logs.glob("*.log"), run.paths.orchestrator.log]):
        name = file.stem
        for line in _tail(file).split("\n"):
            if _WARNING.search(line):
                found[f"{name}: {cut_inside(line.strip(), 600)}"] = None
    return list(found)[-MAX_WARNINGS:]


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - MAX_LOG_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


# Config values: those that were set and where, and those that differ between runs


MAX_VALUE_CHARS = 200
MAX_DIFFERENCES = 10
"""Rows of differing keys above the curves. Others are folded."""
_FOLLOWS = "follows:"
_OWN_PATHS = ("output_dir",)
"""Keys that differ in every run and explain nothing."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The values of a run's config."""

    run: RunHistory
    values: Sequence[Explained]
    notable: Sequence[Explained]
    """Values that differ from their defaults."""
    fault: str = ""
    """Why this version cannot load the config; the values are then those of the files, without defaults' names."""


def config_of(run: RunHistory) -> RunConfig:
    """The values with their origins. A config that this version cannot load is read as plain TOML."""
    is_recorded = (run.paths.configs / ORIGINS).exists()
    try:
        values = list(Source.of_run(run.paths.root).values)
        return RunConfig(run, values, [each for each in values if _is_notable(each, is_recorded)])
    except (UsageError, ConfigError) as error:
        return plain_config(run, "; ".join(error.faults))
    except (OSError, ValueError) as error:
        return plain_config(run, one_line(str(error)))


def _is_notable(value: Explained, is_recorded: bool) -> bool:
    """Without recorded origins, every value comes from the resolved config; only those that are no defaults count."""
    if is_recorded:
        return value.is_of_interest
    return bool(value.value != value.section.model_fields[str(value.path[-1])].get_default(call_default_factory=True))


def plain_config(run: RunHistory, fault: str = "") -> RunConfig:
    """The values as they are in the file, with the recorded origins."""
    origins = _origins(run)
    values = []
    for path, written_value in leaves(run.config()):
        value = None if written_value == "None" else written_value
        origin = origins.get(".".join(map(str, path)))
        written = () if origin is None else (Setting(value, origin),)
        values.append(Explained(path, value, BaseModel, written, None))
    return RunConfig(run, values, [each for each in values if each.written], fault)


def _origins(run: RunHistory) -> dict[str, str]:
    try:
        record = json.loads((run.paths.configs / ORIGINS).read_bytes())
        return {str(key): str(entry["origin"]) for key, entry in record.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def settings_section(run: RunHistory) -> Section:
    """Values of one run that were set, and where; folded, those that follow from them."""
    section = Section("settings", "What ran")
    config = config_of(run)
    if config.fault:
        section.warnings.append(f"This version cannot load the config: {config.fault}")
    if not config.values:
        section.notes.append("The config cannot be read.")
        return section
    chosen = [each for each in config.notable if not each.origin.startswith(_FOLLOWS)]
    rows = [(each.key, _shown(each.value), each.origin) for each in chosen]
    caption = "Config values that were set, and where"
    section.tables.append(Table(("key", "value", "set by"), rows, caption, is_numeric=False))
    # Copies of a shared key say nothing new.
    if rest := [each for each in config.notable if each.origin.startswith(_FOLLOWS)]:
        lines = "\n".join(f"{each.key} = {_shown(each.value)}    # {each.origin}" for each in rest)
        section.listings.append((f"{len(rest)} values that follow from others", lines))
    return section


def differing_keys(groups: Sequence[Group]) -> Section:
    """The config keys whose values differ between the runs."""
    section = Section("differences", "What differs")
    configs = [config_of(run) for group in groups for run in group.runs]
    if faults := [
        f"{each.run.name}: this version cannot load the config: {each.fault}" for each in configs if each.fault
    ]:
        section.notes += faults
        # Defaults that a file leaves out would count as differences from one that was loaded.
        configs = [plain_config(each.run) for each in configs]
    keys: dict[str, None] = {}
    for other in configs[1:]:
        keys |= dict.fromkeys(each.key for each in differences(configs[0].values, other.values))
    by_run = [{each.key: each for each in config.values} for config in configs]
    keys = {key: None for key in keys if key.rpartition(".")[2] not in _OWN_PATHS and _is_no_copy(key, by_run)}
    # A section that only one run has brings all its defaults along. What somebody set makes the difference.
    chosen = {
        key: None
        for key in keys
        if any(key in config_values and config_values[key].origin not in ("default", OURS) for config_values in by_run)
    } or keys
    rows = [(key, *(_of_run(found.get(key)) for found in by_run)) for key in chosen]
    shown, more = (rows, []) if len(rows) <= MAX_DIFFERENCES + 2 else (rows[:MAX_DIFFERENCES], rows[MAX_DIFFERENCES:])
    headers = ("key", *(_column(config.run, groups) for config in configs))
    if shown:
        section.tables.append(Table(headers, shown, "Config keys with different values", is_numeric=False))
    else:
        section.notes.append("The configs have the same values, apart from the output directory.")
    defaults = [(key, *(_of_run(found.get(key)) for found in by_run)) for key in keys if key not in chosen]
    for title, folded in (("more keys that were set", more), ("keys that nobody set", defaults)):
        if folded:
            lines = "\n".join(f"{key}: {' | '.join(values)}" for key, *values in folded)
            section.listings.append((f"{len(folded)} {title}", lines))
    return section


def _of_run(value: Explained | None) -> str:
    return "not there" if value is None else _shown(value.value)


def _is_no_copy(key: str, by_run: Sequence[Mapping[str, Explained]]) -> bool:
    """False for a copy of a shared key, in every run that has it."""
    return not all(found[key].origin.startswith(_FOLLOWS) for found in by_run if key in found)


def _column(run: RunHistory, groups: Sequence[Group]) -> str:
    label = next(group.label for group in groups if run in group.runs)
    return label if label.endswith(run.name) else f"{label}: {run.name}"


def _shown(value: Any) -> str:
    return shortened(value_text(value), MAX_VALUE_CHARS)


# Throughput, where the time went, GPU-hours and money, memory, judges


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
    lines, remark = without_start(lines, "s")
    return chart_of(f"phases-{phases.source}", title, lines, unit="s per step", is_stacked=True, remark=remark)


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
    sums = {name: sum(finite(run.metrics.series(f"judge/{judge}/{name}", source)).values()) for name in _SUMMED}
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


def _judge_charts(run: RunHistory, source: str, judge: str) -> list[Chart]:
    calls, cached = _of_calls(run, source, judge, "calls"), _of_calls(run, source, judge, "cache_hit_rate")
    hits = {step: count * cached.get(step, 0.0) for step, count in calls.items()}
    lines = [Line("calls", calls), Line("from the cache", hits, color=1)]
    charts = chart_of(f"judge-calls-{judge}", f"Judge {judge}: calls", lines)
    seconds = [Line("seconds", _of_calls(run, source, judge, "latency_s"), color=2)]
    return charts + chart_of(f"judge-latency-{judge}", f"Judge {judge}: a call to its server", seconds, unit="s")
