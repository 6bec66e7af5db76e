"""What ran: machine and versions, attempts, warnings of the logs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from medarc_rl.explain.screen import shortened
from medarc_rl.report.charts import Section, Table
from medarc_rl.report.overview import duration, moment
from prime_rl.history.run import RunHistory
from prime_rl.history.spending import Spending
from prime_rl.utils.logger import count_of

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
