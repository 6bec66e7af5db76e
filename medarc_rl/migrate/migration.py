"""Rewrites a file of another version, and reports what happened to each setting."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from medarc_rl.errors import UsageError
from medarc_rl.migrate.draft import Draft, Finding, Verdict, kind_of, versions_of
from medarc_rl.migrate.rules import (
    carry_by_tables,
    check,
    keep_sections,
    missing_environments,
    note_defaults,
    rewrite_by_hand,
    rewrite_environments,
)
from medarc_rl.migrate.text import Document, split_statements, write_layout
from prime_rl.configs.surface.meanings import Version
from prime_rl.utils.pydantic_config import ConfigError
from prime_rl.utils.pydantic_config.toml_files import parse_toml
from prime_rl.utils.tables import KeyPath, leaves

MAX_BYTES = 64 * 1024
MAX_VALUES = 1000
MAX_DEPTH = 50
"""Limits well above any real config. A larger file could take minutes."""

ORDER: Mapping[Verdict, int] = {"moved": 0, "dropped": 1, "note": 2, "not carried": 3, "fault": 4}
"""Order of the report: the most important lines come last."""
VERSIONS: Mapping[Version, str] = {"older": "an older version", "newer": "a newer version"}


@dataclass(frozen=True, slots=True)
class Migration:
    """The new file and its report, line by line."""

    text: str
    report: tuple[str, ...]
    complete: bool
    """Whether everything was carried and the new file loads."""


def migrate(file: Path, kind: str | None = None) -> Migration:
    """Rewrite the config in `file` for the command `kind`. None finds the command from the keys.

    Raises:
        UsageError: the file is not a config, or its command is ambiguous.
    """
    text = _read(file)
    data = _parse(file, text)
    settings = dict(leaves(data))
    try:
        kind = kind or kind_of(settings)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    draft = Draft(kind, versions_of(kind, settings), settings)
    rewrite_environments(draft)
    rewrite_by_hand(draft)
    carry_by_tables(draft)
    keep_sections(draft)
    check(draft, file)
    draft.findings += missing_environments(draft)
    note_defaults(draft)
    document = split_statements(text)
    complete = not any(each.verdict in ("not carried", "fault") for each in draft.findings)
    return Migration(_written(document, draft, data), tuple(_report(file, document, draft)), complete)


def _read(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file") from None
    except IsADirectoryError:
        raise UsageError(f"{file}: a directory, not a TOML file") from None
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    if len(content) > MAX_BYTES:
        raise UsageError(f"{file}: more than {MAX_BYTES // 1024} KiB: not a config")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not UTF-8 text (byte {error.start})") from None


def _parse(file: Path, text: str) -> dict[str, Any]:
    try:
        data = parse_toml(file, text)
    except ConfigError as error:
        raise UsageError(*error.faults) from None
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        level = [item for value in level for item in _items(value)]
        if len(level) > MAX_VALUES:
            raise UsageError(f"{file}: more than {MAX_VALUES} values: not a config")
    if level:
        raise UsageError(f"{file}: tables or lists are nested too deeply")
    return data


def _items(value: Any) -> Collection[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _written(document: Document, draft: Draft, old: dict[str, Any]) -> str:
    """The new settings in the old layout, or the old text if nothing changed."""
    new = draft.data
    if new == old:
        return document.text
    text = write_layout(document, draft)
    if not _reads_as(text, new):
        draft.note("the comments and the order of the file could not be kept")
        return tomli_w.dumps(new)
    return text


def _reads_as(text: str, data: dict[str, Any]) -> bool:
    try:
        return tomllib.loads(text) == data
    except tomllib.TOMLDecodeError:
        return False


def _report(file: Path, document: Document, draft: Draft) -> Iterator[str]:
    """One line per finding, then a summary."""
    lines = {statement.path: statement.line for statement in document.statements}
    in_order = sorted(draft.findings, key=lambda each: (ORDER[each.verdict], _line(each, lines)))
    # Settings of a table that moved have equal texts. Keep the first.
    findings = list({(each.verdict, each.text): each for each in reversed(in_order)}.values())[::-1]
    for finding in findings:
        line = _line(finding, lines)
        place = f"{file}:{line}" if line else str(file)
        is_fault = finding.verdict == "fault"
        yield f"fault: {finding.text}" if is_fault else f"{place}: {finding.verdict}: {finding.text}"
    counts = Counter(each.verdict for each in findings)
    decided: tuple[Verdict, ...] = ("moved", "dropped", "not carried")
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in decided if counts[verdict])
    versions = " and ".join(VERSIONS[version] for version in sorted(draft.versions)) or "this version"
    yield f"{file}: {draft.kind} config of {versions}: {told or 'nothing to change'}"


def _line(finding: Finding, lines: Mapping[KeyPath, int]) -> int:
    """Line number of a finding; 0 for the whole file."""
    origin = finding.origin or ()
    return next((lines[origin[:length]] for length in range(len(origin), 0, -1) if origin[:length] in lines), 0)
