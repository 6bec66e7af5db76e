"""What ran: config values that were set and their origins, machine and versions, attempts, warnings of the logs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from medarc_rl.errors import UsageError
from medarc_rl.explain.differences import differences
from medarc_rl.explain.origins import Explained
from medarc_rl.explain.screen import shortened
from medarc_rl.explain.sources import Source
from medarc_rl.report.charts import Section, Table
from medarc_rl.report.groups import Group
from medarc_rl.report.overview import duration, moment
from prime_rl.history.run import RunHistory
from prime_rl.history.spending import Spending
from prime_rl.utils.pydantic_config import ConfigError
from prime_rl.utils.pydantic_config.describe import value_text

MAX_VALUE_CHARS = 200
MAX_LOG_BYTES = 8 * 2**20
"""Warnings are searched in the last bytes of a log."""
MAX_WARNINGS = 40
_WARNING = re.compile(r"\b(WARNING|ERROR|CRITICAL|FATAL|stalled|Traceback)\b|\bwarning:|\berror:")
_OWN_PATHS = ("output_dir",)
"""Keys that differ in every run and explain nothing."""


def config_of(run: RunHistory) -> list[Explained] | str:
    """The values of a run's config, or a sentence that says why they cannot be read."""
    try:
        return list(Source.of_run(run.paths.root).values)
    except (UsageError, ConfigError) as error:
        return f"The config cannot be read by this version: {'; '.join(error.faults)}"
    except (OSError, ValueError) as error:
        return f"The config cannot be read: {' '.join(str(error).split())}"


def settings_section(run: RunHistory) -> Section:
    """Config, machine and versions of one run."""
    section = Section("settings", "What ran")
    values = config_of(run)
    if isinstance(values, str):
        section.warnings.append(values)
    else:
        # Copies of a shared key say nothing new.
        chosen = [each for each in values if each.is_of_interest and not each.origin.startswith("follows:")]
        rows = [(each.key, _shown(each.value), each.origin) for each in chosen]
        section.tables.append(
            Table(("key", "value", "set by"), rows, "Config values that were set, and where", is_numeric=False)
        )
        rest = [each for each in values if each.is_of_interest and each.origin.startswith("follows:")]
        if rest:
            lines = "\n".join(f"{each.key} = {_shown(each.value)}    # {each.origin}" for each in rest)
            section.listings.append((f"{len(rest)} values that follow from others", lines))
    section.tables += machine_tables([run])
    return section


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
    yield "processor", f"{machine.get('cpu', '?')}, {machine.get('cpu_count', '?')} cores"
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


def differing_keys(groups: Sequence[Group]) -> Section:
    """The config keys whose values differ between the runs. The first run is the one that others are compared with."""
    section = Section("differences", "What differs")
    runs = [(group.label, run) for group in groups for run in group.runs]
    values = [(run, config_of(run)) for _, run in runs]
    section.warnings += [f"{run.name}: {found}" for run, found in values if isinstance(found, str)]
    readable = [(run, found) for run, found in values if not isinstance(found, str)]
    if len(readable) < 2:
        return section
    reference = readable[0][1]
    keys: dict[str, None] = {}
    for _, other in readable[1:]:
        keys |= dict.fromkeys(each.key for each in differences(reference, other))
    by_run = [{each.key: each for each in found} for _, found in readable]
    rows = [
        (key, *(_shown(found[key].value) if key in found else "not there" for found in by_run))
        for key in keys
        if key.rpartition(".")[2] not in _OWN_PATHS and _is_told_once(key, by_run)
    ]
    if rows:
        headers = ("key", *(_column(run, groups) for run, _ in readable))
        section.tables.append(Table(headers, rows, "Config keys with different values", is_numeric=False))
    else:
        section.notes.append("The configs have the same values, apart from the output directory.")
    return section


def _is_told_once(key: str, by_run: Sequence[Mapping[str, Explained]]) -> bool:
    """False for a copy of a shared key in every run that has it."""
    return not all(found[key].origin.startswith("follows:") for found in by_run if key in found)


def _column(run: RunHistory, groups: Sequence[Group]) -> str:
    label = next(group.label for group in groups if run in group.runs)
    return label if label.endswith(run.name) else f"{label}: {run.name}"


def _shown(value: Any) -> str:
    return shortened(value_text(value), MAX_VALUE_CHARS)


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
        section.warnings.append(f"{run.metrics.damaged_lines} damaged lines of metrics.jsonl were left out.")
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
        for line in _tail(file).splitlines():
            if _WARNING.search(line):
                found[f"{name}: {shortened(line.strip(), 300)}"] = None
    return list(found)[-MAX_WARNINGS:]


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - MAX_LOG_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""
