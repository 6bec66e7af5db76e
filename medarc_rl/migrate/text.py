"""Reads a TOML file as statements and writes the new settings in its layout: order, comments and formatting.

tomlkit also keeps comments, but does not serve here (tried with 0.15.2): it moves the items of an array of tables that
other tables interrupt, has no line numbers for the report, and leaves the comments above a key behind when the key
moves. Callers check with `tomllib` that the text is valid.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from medarc_rl.migrate.draft import Draft, Placed, key_text, value_text
from prime_rl.utils.tables import KeyPath

# Old text: statements, with the comments and blank lines around them


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


# New text: the statements that stay, changed or commented out, in blocks


NOT_CARRIED = "# not carried: "


Targets = Mapping[KeyPath, Mapping[KeyPath, Placed]]
"""Paths of old settings, each with its settings in the new file."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A setting of the new file."""

    path: KeyPath
    value: str
    lead: str = ""
    comment: str = ""
    statement: Statement | None = None
    """The old statement, if at most its key changes."""

    def text(self, table: KeyPath, line_end: str) -> str:
        old = self.statement
        if old is not None and (old.path, old.table) == (self.path, table):
            return self.lead + old.text
        return f"{self.lead}{key_text(self.path[len(table) :])} = {self.value}{self.comment}{line_end}"


@dataclass(slots=True)
class Block:
    """A header and what follows it: assignments, and text that is copied."""

    path: KeyPath
    header: str = ""
    source: Statement | None = None
    """The header in the old file that it replaces."""
    lines: list[Assignment | str] = field(default_factory=list)


def write_layout(document: Document, draft: Draft) -> str:
    """The text of the new file."""
    blocks = _Blocks(document)
    targets: dict[KeyPath, dict[KeyPath, Placed]] = {}
    for path, placed in draft.placed.items():
        targets.setdefault(placed.origin, {})[path] = placed
    owned = _owned_settings(document, targets, draft)
    homes = _outline(document, blocks, owned, targets, draft)
    lines = []
    for statement, home in zip(document.statements, homes, strict=True):
        own = {old: targets.get(old, {}) for old in owned[statement.path]}
        whole = _whole(statement, own, draft)
        if whole is not None and statement.value[0] in "{[" and blocks.has_header(whole):
            whole = None
        lines.append((home, list(_lines_of(statement, own, home, whole, draft))))
    blocks.reserve(lines)
    for home, made in lines:
        for line in made:
            blocks.add(line, home)
    claimed = {old for origins in owned.values() for old in origins}
    for origin, settings in targets.items():
        for path, placed in settings.items() if origin not in claimed else ():
            blocks.open_table(path) if placed.value == {} else blocks.add(Assignment(path, value_text(placed.value)))
    return blocks.text(document.tail)


def _owned_settings(document: Document, targets: Targets, draft: Draft) -> dict[KeyPath, list[KeyPath]]:
    """The old settings in each statement, by the statement's path. A header contains its table if that is empty."""
    owned: dict[KeyPath, list[KeyPath]] = {statement.path: [] for statement in document.statements}
    headers = {statement.path for statement in document.statements if statement.is_header}
    for old in dict.fromkeys([*draft.source, *targets]):
        for length in range(len(old), 0, -1):
            if old[:length] in owned and (length == len(old) or old[:length] not in headers):
                owned[old[:length]].append(old)
                break
    return owned


def _outline(
    document: Document, blocks: _Blocks, owned: Mapping[KeyPath, list[KeyPath]], targets: Targets, draft: Draft
) -> list[Block]:
    """Make a block for each table of the old file that remains. Returns the block of each statement."""
    below: dict[KeyPath, list[KeyPath]] = {}
    for statement in document.statements:
        table = statement.path if statement.is_header else statement.table
        below.setdefault(table, []).extend(owned[statement.path])
    homes = []
    home = blocks.all[0]
    for statement in document.statements:
        if statement.is_header:
            settings = below[statement.path]
            path = _new_path(statement.path, settings, targets, blocks)
            if path is None and draft.refused.intersection(settings) and _has_more(statement.path, draft):
                path = statement.path  # for the comments on what was not carried
            home = blocks.take_over(statement, path) if path else blocks.all[-1]
        homes.append(home)
    return homes


def _new_path(table: KeyPath, settings: list[KeyPath], targets: Targets, blocks: _Blocks) -> KeyPath | None:
    """New path of a table: the old one if some settings stay, else the one that most move to. None if none is left."""
    candidates: list[KeyPath] = []
    for old in settings:
        rest = old[len(table) :]
        for new, placed in targets.get(old, {}).items():
            is_same_name = new[len(new) - len(rest) :] == rest
            as_whole = is_same_name if rest else placed.value == {}
            candidates.append(new[: len(new) - len(rest)] if as_whole else new[:-1])
    if table in candidates:
        return table
    possible = [each for each in candidates if each and blocks.has_items_above(each)]
    alike = [each for each in possible if isinstance(each[-1], int) == isinstance(table[-1], int)]
    return max(alike or possible, key=(alike or possible).count) if possible else None


def _lines_of(
    statement: Statement, targets: Targets, home: Block, whole: KeyPath | None, draft: Draft
) -> Iterator[Assignment | str]:
    """Replacement of a statement: itself at `whole`, other assignments, a comment if it was refused, or nothing."""
    lead, comment = statement.attached, statement.comment
    if home.source is statement:
        lead = comment = ""
    else:
        # A blank line separates this comment from the statement, so it stays when the statement goes.
        yield statement.detached
    refused = [old for old in targets if old in draft.refused]
    if whole is not None:
        yield Assignment(whole, statement.value, lead, comment, statement)
    elif targets and len(refused) == len(targets):
        as_it_was = statement.is_header or home.path == statement.table
        yield lead + _commented(statement.text if as_it_was else _setting(statement.path, statement.value + comment))
    else:
        for path, placed in (item for settings in targets.values() for item in settings.items()):
            if placed.value != {} or not (statement.is_header or _has_more(path, draft)):
                yield Assignment(path, value_text(placed.value), lead, comment)
                lead = comment = ""
        if any(targets.values()) and (lead or comment):
            yield f"{lead}{comment.lstrip()}"  # the table exists through its settings
        yield from (_commented(_setting(old, value_text(draft.source[old]))) for old in refused)


def _setting(path: KeyPath, value: str) -> str:
    return f"{key_text(path)} = {value}\n"


def _whole(statement: Statement, targets: Targets, draft: Draft) -> KeyPath | None:
    """New path of a statement whose settings all move together, unchanged, and alone into their table; else None."""
    homes: set[KeyPath | None] = set()
    for old, settings in targets.items():
        rest = old[len(statement.path) :]
        for new, placed in settings.items():
            start = new[: len(new) - len(rest)]
            is_same = new == start + rest and placed.value == draft.source.get(old)
            homes.add(start if is_same and len(settings) == 1 else None)
        if not settings:
            homes.add(None)
    home = homes.pop() if len(homes) == 1 and not statement.is_header else None
    if not home or statement.value[0] not in "{[":
        return home or None
    if isinstance(home[-1], int):
        return None  # a list needs its brackets
    joined = sum(path[: len(home)] == home for path in draft.placed)
    return home if joined == len(targets) else None


def _has_more(table: KeyPath, draft: Draft) -> bool:
    """Whether the new file sets something in this table."""
    return any(path[: len(table)] == table and path != table for path in draft.placed)


def _commented(text: str) -> str:
    return "".join(f"{NOT_CARRIED}{line}" for line in text.splitlines(keepends=True))


class _Blocks:
    """The blocks of the new file in order. The first is the root."""

    def __init__(self, document: Document) -> None:
        self.all = [Block((), document.preamble)]
        self._by_path: dict[KeyPath, Block] = {(): self.all[0]}
        self._reserved: set[KeyPath] = set()
        self._line_end = document.line_end

    def take_over(self, header: Statement, path: KeyPath) -> Block:
        """The block at `path`. A new one is appended, with the old header's comments."""
        if path in self._by_path:
            return self._by_path[path]
        text = header.text if path == header.path else f"{_header_text(path)}{header.comment}{self._line_end}"
        lead = header.detached + header.attached
        if path != header.path and not lead.startswith(("\n", "\r")):
            lead = self._line_end + lead
        return self._insert(Block(path, lead + text, header), len(self.all))

    def open_table(self, path: KeyPath) -> Block:
        """The block at `path`. A new one is inserted after the last block with the longest common path."""
        if path in self._by_path:
            return self._by_path[path]
        if not self.has_items_above(path):
            self.open_table(path[:-1])
        place = len(self.all)
        for length in range(len(path), 0, -1):
            related = [at for at, block in enumerate(self.all) if block.path[:length] == path[:length]]
            if related:
                later = [at for at in related if _is_later_item(self.all[at].path, path)]
                place = later[0] if later else related[-1] + 1
                break
        return self._insert(Block(path, f"{self._line_end}{_header_text(path)}{self._line_end}"), place)

    def has_header(self, table: KeyPath) -> bool:
        """Whether this table, or one in it, has a header."""
        return any(path[: len(table)] == table for path in self._by_path)

    def has_items_above(self, path: KeyPath) -> bool:
        """Whether every list item around a table has its header."""
        lengths = (length for length in range(1, len(path)) if isinstance(path[length - 1], int))
        return all(path[:length] in self._by_path for length in lengths)

    def _insert(self, block: Block, place: int) -> Block:
        self.all.insert(place, block)
        self._by_path[block.path] = block
        return block

    def reserve(self, lines: list[tuple[Block, list[Assignment | str]]]) -> None:
        """Record the tables that dotted keys define. TOML does not allow a header for such a table."""
        for home, made in lines:
            for line in made:
                if isinstance(line, Assignment) and line.statement and _is_dotted_below(line.path, home.path):
                    self._reserve(line.path, home.path)

    def _reserve(self, path: KeyPath, home: KeyPath) -> None:
        self._reserved.update(path[:length] for length in range(len(home) + 1, len(path)))

    def add(self, line: Assignment | str, home: Block | None = None) -> None:
        if isinstance(line, Assignment):
            home = self._block_for(line, home)
        (home or self.all[-1]).lines.append(line)

    def _block_for(self, line: Assignment, home: Block | None) -> Block:
        """The block for a setting; a new one if none fits."""
        table = line.path[:-1]
        if table in self._by_path:
            return self._by_path[table]
        stays = line.statement is not None and line.statement.path == line.path
        fits = home is not None and _is_dotted_below(line.path, home.path)
        if home is not None and fits and (stays or (home.path and self._is_free(table, home.path))):
            self._reserve(line.path, home.path)
            return home
        if table in self._reserved:
            above = (table[:length] for length in range(len(table), -1, -1))
            return next(self._by_path[path] for path in above if path in self._by_path)
        return self.open_table(table)

    def _is_free(self, table: KeyPath, home: KeyPath) -> bool:
        """Whether dotted keys in `home` may define `table`: no table in between has a header."""
        return not any(table[:length] in self._by_path for length in range(len(home) + 1, len(table) + 1))

    def text(self, tail: str) -> str:
        pieces: list[str] = []
        for block in self.all:
            pieces.append(block.header)
            pieces += [line if isinstance(line, str) else line.text(block.path, self._line_end) for line in block.lines]
        return self._joined([*pieces, tail])

    def _joined(self, pieces: list[str]) -> str:
        """The pieces as one text. Blank lines around removed statements are merged."""
        text: list[str] = []
        for piece in filter(None, pieces):
            before = "".join(text[-2:])
            if before and not before.endswith("\n"):
                text.append(self._line_end)
            if not before or before.endswith(self._line_end * 2):
                piece = piece.lstrip("\r\n")
            text.append(piece)
        return "".join(text)


def _is_dotted_below(path: KeyPath, home: KeyPath) -> bool:
    """Whether `path` can be a dotted key in the table `home`: it must not lead through a list."""
    return path[: len(home)] == home and not any(isinstance(part, int) for part in path[len(home) :])


def _is_later_item(path: KeyPath, other: KeyPath) -> bool:
    """Whether `path` is in a later item of the list that `other` is in."""
    for one, two in zip(path, other, strict=False):
        if one != two:
            return isinstance(one, int) and isinstance(two, int) and one > two
    return False


def _header_text(path: KeyPath) -> str:
    return f"[[{key_text(path)}]]" if isinstance(path[-1], int) else f"[{key_text(path)}]"
