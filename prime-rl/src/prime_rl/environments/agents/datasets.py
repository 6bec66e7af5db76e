"""Rows that agents attempt: from a file of the user, or from a function."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prime_rl.configs.rollouts.agents import ROW_FILES
from prime_rl.environments.agents.targets import resolve

MAX_ROWS = 1_000_000


class BadRows(Exception):
    """A dataset cannot be read. The message is one line."""


def read_dataset(name: str) -> list[dict[str, Any]]:
    """The rows of a file (`.jsonl`, `.json`, `.parquet`), or those that the function `module:function` returns.

    Raises:
        BadRows: there are none, or one is no table.
        BadTarget: the function cannot be imported.
    """
    rows = _of_file(Path(name)) if name.endswith(ROW_FILES) else _of_function(name)
    read: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise BadRows(f"{name}: row {number} is no table, but a {type(row).__name__}")
        if number >= MAX_ROWS:
            raise BadRows(f"{name}: more than {MAX_ROWS:,} rows")
        read.append(dict(row))
    if not read:
        raise BadRows(f"{name} has no rows")
    return read


def _of_function(name: str) -> Iterable[Any]:
    function = resolve(name)
    if not callable(function):
        raise BadRows(f"{name} is no function")
    try:
        rows = function()
    except (Exception, SystemExit) as error:
        raise BadRows(f"{name} failed: {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not isinstance(rows, Iterable):
        raise BadRows(f"{name} returned no rows, but a {type(rows).__name__}")
    return rows


def _of_file(file: Path) -> Iterable[Any]:
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet

            rows: list[Any] = pyarrow.parquet.read_table(file).to_pylist()
            return rows
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            loaded = json.loads(text)
            return loaded if isinstance(loaded, list) else [loaded]
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise BadRows(f"{file} cannot be read: {' '.join(str(error).split())}") from error
