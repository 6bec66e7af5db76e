"""Rows that agents attempt: from a file of the user, or from a function."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prime_rl.configs.rollouts.environments import ROW_FILES
from prime_rl.environments.agents.targets import resolve
from prime_rl.utils.errors import RowFileError
from prime_rl.utils.rows import stream_file

MAX_ROWS = 1_000_000


class BadRows(Exception):
    """A dataset cannot be read. The message is one line."""


def read_dataset(name: str) -> list[dict[str, Any]]:
    """The rows of a file (`.jsonl`, `.json`, `.parquet`), or those that the function `module:function` returns.

    Raises:
        BadRows: there are none, or one is no table.
        BadTarget: the function cannot be imported.
    """
    read: list[dict[str, Any]] = []
    for number, row in enumerate(_of_file(Path(name)) if name.endswith(ROW_FILES) else _of_function(name)):
        if not isinstance(row, Mapping):
            raise BadRows(f"{name}: row {number} must be a table, not a {type(row).__name__}")
        if number >= MAX_ROWS:
            raise BadRows(f"{name}: more than {MAX_ROWS:,} rows")
        read.append(dict(row))
    if not read:
        raise BadRows(f"{name} has no rows")
    return read


def _of_function(name: str) -> Iterator[Any]:
    # A program such as `orchestrator` does not search the directory that it starts in; an agent's process does.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    function = resolve(name)
    if not callable(function):
        raise BadRows(f"{name} is not a function")
    try:
        rows = function()
        if not isinstance(rows, Iterable):
            raise BadRows(f"{name} returned a {type(rows).__name__} instead of a list of rows")
        # Within the block: a generator's code runs here.
        yield from rows
    except (Exception, SystemExit) as error:
        if isinstance(error, BadRows):
            raise
        raise BadRows(f"{name} failed: {type(error).__name__}: {' '.join(str(error).split())}") from error


def _of_file(file: Path) -> Iterator[Any]:
    try:
        yield from (read() for read in stream_file(file))
    except (OSError, RowFileError) as error:
        raise BadRows(f"{file} cannot be read: {' '.join(str(error).split())}") from error
