"""Reports an evaluation: a table for the terminal and a summary file for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from prime_rl.orchestrator.evaluation.scores import score_titles
from prime_rl.utils.files import replacing_file

PLAIN_WIDTH = 240
"""Width of the table in a file or a pipe."""


@dataclass(frozen=True, slots=True)
class Row:
    """The scores of one candidate in one environment."""

    candidate: str
    step: int
    env: str
    metrics: Mapping[str, float]
    """As in `metrics.jsonl`, without the prefix `eval/<env>/`."""


def write_summary(rows: Sequence[Row], path: Path) -> None:
    """Write all rows as a JSON list."""
    with replacing_file(path) as scratch:
        scratch.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


def print_table(rows: Sequence[Row], file: TextIO = sys.stdout) -> None:
    """Print one line per candidate and environment: with colours and rules on a terminal, otherwise plain."""
    on_terminal = file.isatty()
    scores = {name: title for row in rows for name, title in score_titles(row.metrics).items()}
    is_unscored = any(row.metrics.get("reward_errors/mean", 0) > 0 for row in rows)
    table = Table(box=SIMPLE_HEAD if on_terminal else None, pad_edge=False, header_style="bold")
    for title in ("weights", "environment"):
        table.add_column(title)
    for title in (
        *scores.values(),
        "length",
        "truncated",
        "failed",
        "seconds",
        *(["reward errors"] if is_unscored else []),
    ):
        table.add_column(title, justify="right")
    for row in rows:
        unscored = [_cell(row.metrics, "reward_errors/mean", "{:.1%}")] if is_unscored else []
        shown = (*(_cell(row.metrics, name, "{:.3f}") for name in scores), *_others(row), *unscored)
        table.add_row(row.candidate, row.env, *shown)
    Console(file=file, width=None if on_terminal else PLAIN_WIDTH, highlight=False).print(table)


def _others(row: Row) -> list[str]:
    return [
        _cell(row.metrics, "completion_len/mean", "{:.1f}"),
        _cell(row.metrics, "is_truncated/mean", "{:.1%}"),
        _cell(row.metrics, "failed/count", "{:.0f}"),
        _cell(row.metrics, "time", "{:.1f}"),
    ]


def _cell(metrics: Mapping[str, float], name: str, form: str) -> str:
    """Empty if there is no such value, such as `pass@k` for graded rewards."""
    return form.format(metrics[name]) if name in metrics else ""
