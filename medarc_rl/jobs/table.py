"""Jobs as lines for a person, and as JSON for a program."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from medarc_rl.jobs.record import JobRecord, Status
from prime_rl.watch.overview.words import printable

Row = tuple[JobRecord, Status]
_MAX_CHARS = 40


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps([_table(*row) for row in rows], indent=1)


def _table(record: JobRecord, status: Status) -> dict[str, Any]:
    table = record.to_table()
    del table["format"], table["ended"]
    return {**table, "state": status.state, "detail": status.detail}


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """One line for each job, newest first, in columns."""
    heads = ("job", "name", "to", "id", "state", "submitted", "output")
    cells = [heads, *(_cells(*row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _cells(record: JobRecord, status: Status) -> tuple[str, ...]:
    texts = (record.key, record.name, record.backend, record.id)
    shown = tuple(printable(text, _MAX_CHARS) for text in texts)
    return (*shown, status.state, local_time(record.submitted), printable(record.output))


def local_time(stamp: str) -> str:
    """`2026-11-22 18:00`, in this machine's time zone."""
    try:
        return datetime.fromisoformat(stamp).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return printable(stamp, 16)


def described(record: JobRecord, status: Status) -> Iterator[str]:
    """All about one job."""
    git = record.git or {}
    commit = f"{git.get('commit', '?')}{' with local changes' if git.get('is_changed') else ''}"
    rows = {
        "job": f"{record.key}  {record.name}",
        "state": f"{status.state}{f': {status.detail}' if status.detail else ''}",
        record.backend: record.id,
        "config": f"{record.kind}  {record.config}",
        "output": record.output,
        "submitted": f"{local_time(record.submitted)} by {record.user}@{record.host} in {record.directory}",
        "commit": commit if record.git else "no git repository",
        "command": " ".join(map(str, record.argv)),
        **record.details,
    }
    width = max(map(len, rows))
    for name, text in rows.items():
        yield f"{printable(name, _MAX_CHARS):<{width}}  {printable(str(text), 2000)}"
