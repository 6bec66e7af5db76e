"""Shows the scores of an evaluation: a table for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from medarc_rl.lm_eval.results import write_private
from medarc_rl.lm_eval.scores import Row
from prime_rl.utils.errors import one_line

PLAIN_WIDTH = 240
"""Width of the table in a file or a pipe."""


def write_summary(rows: Sequence[Row], path: Path) -> None:
    write_private(path, f"{as_json(rows)}\n")


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps([row.as_json() for row in rows], indent=2)


def print_table(rows: Sequence[Row], file: TextIO = sys.stdout) -> None:
    """Print one line per score. `*` marks a difference of more than two standard errors."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    on_terminal = file.isatty()
    table = Table(box=SIMPLE_HEAD if on_terminal else None, pad_edge=False, header_style="bold")
    has_published = any(row.published for row in rows)
    for title in ("task", "metric", "weights"):
        table.add_column(title, overflow="fold")
    for title in ("n", "score", "± se", "vs base", *(["published"] if has_published else [])):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in _cells(row, has_published)))
    console = Console(file=file, width=None if on_terminal else PLAIN_WIDTH, highlight=False)
    console.print(table)
    for line in footnotes(rows):
        console.print(Text(one_line(line)))


def _cells(row: Row, has_published: bool) -> list[str]:
    shots = "" if row.shots is None else f", {row.shots}-shot"
    weights = row.candidate.replace("step_", "step ") + (" (chat)" if row.chat_template else "")
    cells = [f"{row.task}{shots}", row.metric, weights, str(row.n or ""), f"{row.value:.4f}"]
    cells += ["" if row.stderr is None else f"{row.stderr:.4f}", _difference(row)]
    return [*cells, *([f"{row.published.value:.4f}" if row.published else ""] if has_published else [])]


def _difference(row: Row) -> str:
    found = row.difference
    if found is None:
        return ""
    spread = "" if found.stderr is None else f" ± {found.stderr:.4f}"
    return f"{found.value:+.4f}{spread}{'*' if found.is_significant else ' '}"


def footnotes(rows: Sequence[Row]) -> list[str]:
    """What a reader of the table must know, one line each."""
    lines: list[Any] = []
    if any(row.difference for row in rows):
        lines.append("* more than two standard errors from the base model (paired by question where possible)")
    if len({row.chat_template for row in rows}) > 1:
        lines.append(
            "Some models were asked as a chat and others with plain text: --apply-chat-template yes or no asks alike."
        )
    lines += dict.fromkeys(f"published: {row.published.source}" for row in rows if row.published)
    lines += dict.fromkeys(
        f"warning: {row.candidate.replace('step_', 'step ')} | {row.task}: {note}" for row in rows for note in row.notes
    )
    return lines
