"""Reads the columns of common dataset formats as `messages`, `prompt` and `completion`, or `text`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from prime_rl.checks.data_files import Part
from prime_rl.configs.sft import ColumnsConfig, RowFormatConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.utils.rows import parsed

Row = Mapping[str, Any]

FORMATS = (
    ("messages",),
    ("conversations",),
    ("instruction", "output"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("text",),
)
"""The columns of each format. Of several that apply to a row, the first is read."""
EXPECTED = "`messages`, `conversations`, `instruction` and `output`, `prompt` and `response` or `completion`, or `text`"

_WITH_EVERY_FORMAT = ("tools", "chat_template_kwargs")
_WITH_MESSAGES = ("messages", "conversations", "prompt", "completion")


def renamed(row: Row, config: RowFormatConfig) -> Row:
    """A row under our names for its columns, for the keys of its messages, and for their roles."""
    columns = config.columns
    if chosen := columns.of_rows:
        kept = {name: row[name] for name in _WITH_EVERY_FORMAT if name in row}
        row = {**kept, **{ours: row.get(theirs) for ours, theirs in chosen.items()}}
    if not (columns.role or columns.content or config.roles):
        return row
    return {name: _renamed_messages(name, value, config) for name, value in row.items()}


def standard(row: Row) -> Row:
    """A row of any of `FORMATS` as `messages`, `prompt` and `completion`, or `text`.

    A question and its answer become a conversation. `prompt` and `completion` stay: as texts, they are trained without
    a chat template.
    """
    filled = {name: value for name, value in row.items() if value is not None}
    kind = next((kind for kind in FORMATS if all(name in filled for name in kind)), ())
    match kind:
        case ("messages",) | ("conversations",):
            messages = decoded(filled[kind[0]], kind[0])
        case ("instruction", "output"):
            question = "\n\n".join(str(filled[name]) for name in ("instruction", "input") if filled.get(name))
            messages = [*_history(filled.get("history")), *_turn(question, filled["output"])]
        case ("prompt", "response"):
            asked, answer = filled["prompt"], filled["response"]
            messages = [*asked, *_turn(None, answer)] if isinstance(asked, list) else _turn(asked, answer)
        case _:
            return row
    if filled.get("system") and isinstance(messages, list):
        messages = [{"role": "system", "content": filled["system"]}, *messages]
    return {**{name: filled[name] for name in _WITH_EVERY_FORMAT if name in filled}, "messages": messages}


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
    columns = renamed(row, config)
    if not any(all(name in columns for name in kind) for kind in FORMATS):
        raise DataError(f"{part}: {found}; expected {EXPECTED}. Name other columns in {part.section}.columns")


def decoded(value: Any, what: str) -> Any:
    """The value, or what its text holds: columnar files and CSV store nested values as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parsed(value)
    except ValueError as error:
        raise DataError(f"{what}: not valid JSON: {getattr(error, 'msg', error)}") from error


def _renamed_messages(name: str, value: Any, config: RowFormatConfig) -> Any:
    """A column of a row; if it holds messages, with our names for their keys and roles."""
    if name not in _WITH_MESSAGES:
        return value
    value = decoded(value, name) if name in ("messages", "conversations") else value
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


def _turn(question: Any, answer: Any) -> list[dict[str, Any]]:
    asked = [] if question is None else [{"role": "user", "content": question}]
    return [*asked, {"role": "assistant", "content": answer}]


def _history(pairs: Any) -> list[dict[str, Any]]:
    """Earlier turns, as pairs of question and answer."""
    if not isinstance(pairs or [], list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs or []):
        raise DataError(f"`history` must be a list of pairs of question and answer, got {pairs!r}")
    return [message for pair in pairs or [] for message in _turn(*pair)]
