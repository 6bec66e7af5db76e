"""Options of the benchmarks against TRL."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trl_venv import DEFAULT_DIRECTORY


def parse_options(
    parser: argparse.ArgumentParser, out: Path, rows: Sequence[str], default_rows: Sequence[str]
) -> argparse.Namespace:
    """Add to `parser` which of `rows` to measure, how often and where to write, and parse the command line."""
    parser.add_argument("--rounds", type=int, default=3, help="0 only prints the table of what was measured")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=default_rows, help=", ".join(rows))
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--trl-venv", type=Path, default=DEFAULT_DIRECTORY, help="made if it is not there")
    options = parser.parse_args()
    unknown = [row for row in options.rows if row not in rows]
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(rows)}")
    return options
