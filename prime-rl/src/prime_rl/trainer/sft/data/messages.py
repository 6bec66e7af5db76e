"""Renames the columns, keys and roles of a dataset's rows as `data.columns` and `data.roles` say, and checks them.

`utils/conversations.py` reads the renamed rows as conversations.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from prime_rl.checks.data_files import Part
from prime_rl.configs.data import ColumnsConfig, RowFormatConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.sft.data.pairs import EXPECTED_LABEL, EXPECTED_PAIR, LABELLED_FORMATS, SCORES, SIDES
from prime_rl.utils.conversations import EXPECTED, FORMATS, WITH_EVERY_FORMAT, NamedRow, Row, RowFault, decoded

_WITH_MESSAGES = ("messages", "conversations", "prompt", "completion", *SIDES)


def renamed(row: Row, config: RowFormatConfig, folder: Path = Path()) -> Row:
    """A row under our names for its columns, for the keys of its messages, and for their roles.

    `folder` is where its file lies.
    """
    columns = config.columns
    if chosen := columns.of_rows:
        kept = {name: row[name] for name in (*WITH_EVERY_FORMAT, "margin", *SCORES) if name in row}
        row = {**kept, **{ours: row.get(theirs) for ours, theirs in chosen.items()}}
    if columns.role or columns.content or config.roles:
        row = {name: _renamed_messages(name, value, config) for name, value in row.items()}
    return NamedRow(row, chosen, folder)


def check_columns(part: Part, row: Row) -> None:
    """Check that a row of a dataset has columns to train on.

    Raises:
        DataError: a column of `data.columns` is missing, or no format applies. The message lists the columns.
    """
    config = part.format
    found = f"found the columns {', '.join(row) or '(none)'}"
    for ours, theirs in config.columns.of_rows.items():
        if theirs not in row:
            near = get_close_matches(theirs, row, 1)
            advice = f"; did you mean {near[0]!r}?" if near else ""
            raise DataError(f"{part}: no column {theirs!r} for columns.{ours}; {found}{advice}")
    columns = {**dict.fromkeys(row), **config.columns.of_rows} if not config.columns.of_rows else config.columns.of_rows
    formats, expected = {
        "samples": (FORMATS, EXPECTED),
        "pairs": ((SIDES,), EXPECTED_PAIR),
        "scored pairs": ((SIDES,), EXPECTED_PAIR),
    }.get(part.holds, (LABELLED_FORMATS, EXPECTED_LABEL))
    if not any(all(name in columns for name in kind) for kind in formats):
        is_labelled = part.holds == "pairs" and "label" in columns
        advice = "; for answers with a label set loss.type = 'kto'" if is_labelled else ""
        raise DataError(f"{part}: {found}; expected {expected}. Name other columns in {part.section}.columns{advice}")


def _renamed_messages(name: str, value: Any, config: RowFormatConfig) -> Any:
    """A column of a row; if it holds messages, with our names for their keys and roles."""
    if name not in _WITH_MESSAGES:
        return value
    if name in ("messages", "conversations"):
        try:
            value = decoded(value, name)
        except RowFault:
            return value  # reading the row tells it, with its place
    if not isinstance(value, list):
        return value
    columns, roles = config.columns, config.roles
    return [_renamed_message(each, columns, roles) if isinstance(each, Mapping) else each for each in value]


def _renamed_message(message: Mapping[str, Any], columns: ColumnsConfig, roles: Mapping[str, str]) -> dict[str, Any]:
    ours = {theirs: name for name, theirs in (("role", columns.role), ("content", columns.content)) if theirs}
    message = {ours.get(name, name): value for name, value in message.items()}
    key = "from" if "from" in message and "role" not in message else "role"
    named = key in message and isinstance(message[key], str)
    return {**message, key: roles.get(message[key], message[key])} if named else message
