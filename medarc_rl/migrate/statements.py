"""Splits TOML text into statements, keeping every character.

Callers check with `tomllib` that the text is valid. tomlkit also keeps comments, but it reorders an array of tables
that other tables interrupt, and has no line numbers.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from prime_rl.utils.tables import KeyPath

_BLANK_OR_COMMENT = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\r\n|\Z)")
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""(?:"{0,2})'
    r"|'''.*?'''(?:'{0,2})"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|#[^\r\n]*"
    r"|[\[\]{}=]"
    r"|\r?\n",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Statement:
    """A header or an assignment."""

    line: int
    """Line number, from 1."""
    detached: str
    """Blank lines and comments above it, up to the last blank line."""
    attached: str
    """Comment lines directly above it, and its indentation."""
    text: str
    """The statement with its line end."""
    table: KeyPath
    """Path of the table that it is in."""
    path: KeyPath
    """Path from the root of the file, with the indices of list items."""
    value: str
    """Value as written; empty for a header."""
    comment: str
    """Comment at its end, with the spaces before it."""

    @property
    def is_header(self) -> bool:
        return not self.value


@dataclass(frozen=True, slots=True)
class Document:
    """The statements of a file, and the blank lines and comments around them."""

    preamble: str
    """Comments and blank lines at the top of the file."""
    statements: tuple[Statement, ...]
    tail: str
    line_end: str

    @property
    def text(self) -> str:
        texts = (each.detached + each.attached + each.text for each in self.statements)
        return "".join([self.preamble, *texts, self.tail])


def split_statements(text: str) -> Document:
    """Split valid TOML. `document.text` is `text` again."""
    line_end = "\r\n" if "\r\n" in text else "\n"
    statements = tuple(_statements(text))
    if not statements:
        return Document("", (), text, line_end)
    length = sum(len(each.detached + each.attached + each.text) for each in statements)
    first = replace(statements[0], detached="")
    return Document(statements[0].detached, (first, *statements[1:]), text[length:], line_end)


def _statements(text: str) -> Iterator[Statement]:
    paths = _Paths()
    lead_start = start = 0
    line = 1
    while start < len(text):
        blank = _BLANK_OR_COMMENT.match(text, start)
        if blank:
            start = blank.end()
            continue
        while text[start] in " \t":
            start += 1
        end, equals, comment = _extent(text, start)
        value_end = comment if comment is not None else end
        is_header = text[start] == "["
        detached, attached = _split_lead(text[lead_start:start], is_first=lead_start == 0)
        before = len(text[start:value_end].rstrip()) + start
        yield Statement(
            line=line + text.count("\n", lead_start, start),
            detached=detached,
            attached=attached,
            text=text[start:end],
            table=paths.table,
            path=paths.header(text[start:before]) if is_header else paths.assignment(text[start:equals]),
            value="" if is_header else text[equals + 1 : before].strip(),
            comment="" if comment is None else text[before:end].rstrip("\r\n"),
        )
        line += text.count("\n", lead_start, end)
        lead_start = start = end


def _extent(text: str, start: int) -> tuple[int, int, int | None]:
    """End of the statement that starts here, position of its first `=`, and start of the comment behind it."""
    depth = 0
    equals = start
    comment = None
    for match in _TOKEN.finditer(text, start):
        token = match[0]
        if token in ("[", "{"):
            depth += 1
        elif token in ("]", "}"):
            depth -= 1
        elif token == "=" and equals == start:
            equals = match.start()
        elif token.startswith("#") and depth == 0:
            comment = match.start()
        elif token.endswith("\n") and token.strip() == "" and depth == 0:
            return match.end(), equals, comment
    return len(text), equals, comment


def _split_lead(lead: str, is_first: bool) -> tuple[str, str]:
    """Split the comments above a statement into those that stay and those that belong to the statement.

    Comments at the top of a file are about the file.
    """
    lines = lead.splitlines(keepends=True)
    indent = lines.pop() if lines and not lines[-1].endswith("\n") else ""
    count = len(lines)
    while not is_first and count > 0 and lines[count - 1].strip():
        count -= 1
    return "".join(lines[:count]), "".join(lines[count:]) + indent


class _Paths:
    """Computes the full paths of keys from the headers above them."""

    def __init__(self) -> None:
        self.table: KeyPath = ()
        self._lengths: dict[KeyPath, int] = {}

    def header(self, text: str) -> KeyPath:
        table: Any = tomllib.loads(text)
        names: list[str] = []
        while isinstance(table, dict) and table:
            name, table = next(iter(table.items()))
            names.append(name)
        path = self._resolved(names[:-1])
        if isinstance(table, list):
            index = self._lengths.get((*path, names[-1]), 0)
            self._lengths[(*path, names[-1])] = index + 1
            self.table = (*path, names[-1], index)
        else:
            self.table = self._resolved(names)
        return self.table

    def assignment(self, key: str) -> KeyPath:
        return (*self.table, *key_names(key))

    def _resolved(self, names: list[str]) -> KeyPath:
        """The path of a table. The name of a list in a header means its last item."""
        path: KeyPath = ()
        for name in names:
            path = (*path, name)
            if path in self._lengths:
                path = (*path, self._lengths[path] - 1)
        return path


def key_names(key: str) -> list[str]:
    """The names of a dotted key, without quotes."""
    table: Any = tomllib.loads(f"{key} = 0")
    names = []
    while isinstance(table, dict):
        name, table = next(iter(table.items()))
        names.append(name)
    return names
