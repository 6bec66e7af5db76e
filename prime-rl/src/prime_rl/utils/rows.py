"""Reads rows of local files on demand: JSON lines, JSON, CSV, Excel, Parquet, Arrow, and text files as documents.

`datasets` is not used for files, because its import adds a second to every start.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import importlib.util
import io
import json
import math
import os
import re
import zipfile
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from prime_rl.utils.errors import RowFileError

if TYPE_CHECKING:
    from _csv import Reader as CsvReader

    import pyarrow


DOCUMENT_KINDS = (".txt", ".md")
TEXT_KINDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", *DOCUMENT_KINDS)
KINDS = (*TEXT_KINDS, ".xlsx", ".parquet", ".arrow")
COMPRESSIONS = (".gz", ".zst")
KNOWN_KINDS = f"{', '.join(KINDS)}; the text files also with {' or '.join(COMPRESSIONS)}"


def kind_of(path: Path) -> str | None:
    """The kind of a data file, by its suffix: one of `KINDS`, or None. `rows.csv.gz` is a .csv."""
    if path.suffix in COMPRESSIONS:
        inner = Path(path.stem).suffix
        return inner if inner in TEXT_KINDS else None
    return path.suffix if path.suffix in KINDS else None


def files_of_split(directory: Path, split: str) -> tuple[Path, ...]:
    """The files of rows in a directory or its `data` whose names begin with the split; for `train`, or else all.

    A directory without rows may hold documents, at any depth. Beside rows, a README.md is not data.
    """
    files = sorted(
        path for path in [*directory.glob("*"), *directory.glob("data/*")] if _holds_rows(path) and path.is_file()
    ) or sorted(
        path
        for path in directory.rglob("*")
        if kind_of(path) in DOCUMENT_KINDS
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    )
    named = [path for path in files if path.name.startswith((f"{split}-", f"{split}."))]
    return tuple(named or (files if split == "train" else []))


def _holds_rows(path: Path) -> bool:
    # Excel keeps a file ~$NAME.xlsx while somebody has NAME.xlsx open.
    return kind_of(path) not in (None, *DOCUMENT_KINDS) and not path.name.startswith("~$")


def is_saved(directory: Path) -> bool:
    """Whether `datasets` wrote the directory with `save_to_disk`."""
    return (directory / "dataset_dict.json").is_file() or (directory / "state.json").is_file()


Row = Mapping[str, Any]

_LINES = (".jsonl", ".ndjson")
_TABLES = (".csv", ".tsv")
_SEPARATORS = (",", ";", "\t", "|")
"""Of CSV files. Of those that the header has as often, the first."""
_SEP_LINE = re.compile(r"sep=([,;|\t])")
_QUOTED = re.compile(r'"[^"]*"')
DOCUMENT_BYTES = 2**21
"""A text file is one row. A longer one is several, of at most so many bytes, cut between paragraphs where it can be: a
tokenizer takes 300 bytes of memory for each character of a text."""
_LONGEST_FIELD = 2**31 - 1
_BLOCK_BYTES = 2**20
_HEAD_BYTES = 1024


class RowList:
    """Rows, and the place of each one for messages."""

    def __init__(self, rows: Sequence[Row], name: str) -> None:
        self.rows = rows
        self.name = name

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def where(self, index: int) -> str:
        """File and line of row `index`, or dataset and row, for messages."""
        return f"{self.name}, row {index}"


@dataclass(frozen=True, slots=True)
class StreamedRow:
    """A row of a stream, which is parsed when it is called."""

    read: Callable[[], Row]
    where: str
    """File and line, or dataset and row, for messages."""

    def __call__(self) -> Row:
        return self.read()


class JsonLines(RowList):
    """A JSON Lines file. All lines are checked when it is opened, and parsed again on access."""

    def __init__(self, path: Path) -> None:
        super().__init__((), str(path))
        self.path = path
        self._file = path.open("rb")
        self._offsets, self._lengths, self._numbers = array("q"), array("q"), array("q")
        offset = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                parse_line(path, number, line)
                self._offsets.append(offset)
                self._lengths.append(len(line))
                self._numbers.append(number)
            offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        line = os.pread(self._file.fileno(), self._lengths[index], self._offsets[index])
        return parse_line(self.path, self._numbers[index], line)

    def where(self, index: int) -> str:
        return f"{self.path}:{self._numbers[index]}"


class ParsedRows(RowList):
    """The rows of a file that is read in order, with the number of the line of each."""

    def __init__(self, path: Path, rows: Sequence[tuple[int, Row]]) -> None:
        super().__init__([row for _, row in rows], str(path))
        self._numbers = array("q", [number for number, _ in rows])

    def where(self, index: int) -> str:
        return f"{self.name}:{self._numbers[index]}"


class TextTable(RowList):
    """A CSV or TSV file. All rows are checked when it is opened, and parsed again on access."""

    def __init__(self, path: Path) -> None:
        super().__init__((), str(path))
        self.path = path
        self._file = path.open("rb")
        self._offsets, self._lengths, self._numbers = array("q"), array("q"), array("q")
        self._read_bytes = 0
        self._delimiter = _delimiter_of(path)
        fields = _fields_of(path, self._lines(), self._delimiter)
        _, self._header = next(fields)
        before = self._read_bytes
        for number, _ in fields:
            self._offsets.append(before)
            self._lengths.append(self._read_bytes - before)
            self._numbers.append(number)
            before = self._read_bytes

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        text = os.pread(self._file.fileno(), self._lengths[index], self._offsets[index]).decode()
        # Empty lines come before the row.
        fields = next(fields for fields in _csv_reader(io.StringIO(text, newline=""), self._delimiter) if fields)
        return dict(zip(self._header, fields, strict=True))

    def where(self, index: int) -> str:
        return f"{self.path}:{self._numbers[index]}"

    def _lines(self) -> Iterator[str]:
        """Lines one at a time, so that the bytes read are those of the rows so far."""
        for number, line in enumerate(self._file, 1):
            encoding = "utf-8" if self._read_bytes else "utf-8-sig"
            self._read_bytes += len(line)
            try:
                text = line.decode(encoding)
            except UnicodeDecodeError as error:
                raise RowFileError(f"{self.path}:{number}: not UTF-8 text (byte {error.start})") from error
            yield text


class Documents(RowList):
    """A text file: one row with the column `text`, or several of a long file. All of it is checked when it is opened.

    Line ends are those of Unix, and a byte order mark is left out.
    """

    def __init__(self, path: Path) -> None:
        super().__init__((), str(path))
        self.path = path
        # A compressed file has no places to go back to.
        self._file = None if path.suffix in COMPRESSIONS else path.open("rb")
        self._texts: list[str] = []
        self._offsets, self._lengths, self._numbers = array("q"), array("q"), array("q")
        offset, number = 0, 1
        for piece in self._pieces():
            try:
                text = piece.decode("utf-8-sig" if offset == 0 else "utf-8")
            except UnicodeDecodeError as error:
                raise RowFileError(f"{path}: not UTF-8 text (byte {offset + error.start})") from error
            if text.strip():
                self._offsets.append(offset)
                self._lengths.append(len(piece))
                self._numbers.append(number)
                if self._file is None:
                    self._texts.append(text)
            offset += len(piece)
            number += piece.count(b"\n")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        if self._file is None:
            text = self._texts[index]
        else:
            content = os.pread(self._file.fileno(), self._lengths[index], self._offsets[index])
            text = content.decode("utf-8-sig" if self._offsets[index] == 0 else "utf-8")
        return {"text": text.replace("\r\n", "\n")}

    def where(self, index: int) -> str:
        return f"{self.path}:{self._numbers[index]}"

    def _pieces(self) -> Iterator[bytes]:
        with opened(self.path) as file:
            held = b""
            while block := file.read(DOCUMENT_BYTES - len(held)):
                held += block
                if len(held) == DOCUMENT_BYTES:
                    cut = _paragraph_end(held)
                    yield held[:cut]
                    held = held[cut:]
            if held:
                yield held


def _paragraph_end(content: bytes) -> int:
    """Where to cut a text: behind the last empty line, or else line end, blank, or whole character."""
    for mark in (b"\n\n", b"\n\r\n", b"\n", b" "):
        if (at := content.rfind(mark, len(content) // 2)) >= 0:
            return at + len(mark)
    end = len(content)
    while end > 1 and content[end - 1] & 0xC0 == 0x80:  # the second to fourth byte of a character
        end -= 1
    return end - 1


class TableRows(RowList):
    """An Arrow table read row by row."""

    def __init__(self, table: pyarrow.Table, path: Path, before: int = 0) -> None:
        """`before` is the number of rows of the file that come before those of the table."""
        super().__init__((), str(path))
        self._before = before
        # A slice of a table takes as long as the table has batches, and a file may have thousands.
        self._batches = [batch for batch in table.to_batches() if batch.num_rows]
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Row:
        at = bisect_right(self._ends, index)
        batch = self._batches[at]
        try:
            rows = batch.slice(index - self._ends[at] + batch.num_rows, 1).to_pylist(maps_as_pydicts="lossy")
        except (ValueError, OverflowError) as error:  # text that is not UTF-8, or a date that Python cannot hold
            raise RowFileError(f"{self.where(index)}: {error}") from error
        return without_fills(rows[0])

    def where(self, index: int) -> str:
        return super().where(self._before + index)


def without_fills(row: Row) -> Row:
    """A row of a columnar file without the nulls that it fills in for missing keys of nested objects.

    Arrow gives all objects of a column the same keys. A null that was meant cannot be told from one that was filled in;
    an object whose nulls count is stored as JSON text. Columns keep their nulls, and so do lists of plain values.
    """
    return {name: _without_fills(value) for name, value in row.items()}


def _without_fills(value: Any) -> Any:
    if isinstance(value, dict):
        items = ((key, _without_fills(each)) for key, each in value.items())
        return {key: each for key, each in items if each is not None}
    if isinstance(value, list):
        return [_without_fills(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


class _Undecoded(Sequence[Row]):
    """Rows of `datasets` whose images are bytes and paths. It would decode them itself, without limits."""

    def __init__(self, dataset: Any) -> None:
        self.tables = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self.tables)

    def __getitem__(self, index: Any) -> Any:
        return self.tables[index : index + 1].to_pylist(maps_as_pydicts="lossy")[0]


def undecoded(dataset: Any) -> Any:
    """A `Dataset` whose rows hold images as bytes and paths."""
    return _Undecoded(dataset) if _has_images(dataset.features) else dataset


def _has_images(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return any(map(_has_images, feature.values()))
    if isinstance(feature, list):
        return any(map(_has_images, feature))
    return type(feature).__name__ == "Image" or _has_images(getattr(feature, "feature", None) or [])


def read_file(path: Path) -> RowList:
    """Read all rows of a file. Raises RowFileError if it cannot be read, or its content does not match its suffix."""
    kind = kind_of(path)
    assert kind is not None, "files of other kinds are refused when they are looked for"
    try:
        if kind in _LINES and path.suffix in COMPRESSIONS:
            return ParsedRows(path, list(_numbered_lines(path)))
        return _READERS[kind](path)
    except OSError as error:
        raise RowFileError(f"{path}: cannot be read: {error.strerror or error}") from error


def stream_file(path: Path) -> Iterator[StreamedRow]:
    """Yield each row, in order. Only a small part of the file is in memory.

    Raises:
        RowFileError: its content does not match its suffix.
    """
    kind = kind_of(path)
    if kind == ".parquet":
        yield from _stream_parquet(path)
    elif kind in _LINES:
        with opened(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield StreamedRow(partial(parse_line, path, number, line), f"{path}:{number}")
    elif kind in _TABLES:
        yield from (StreamedRow(partial(dict, row), f"{path}:{number}") for number, row in _table_rows(path))
    else:
        rows = read_file(path)
        yield from (StreamedRow(partial(rows.__getitem__, index), rows.where(index)) for index in range(len(rows)))


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed according to its suffix.

    Raises:
        RowFileError: it is not compressed like that, or it is cut short.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as unpacked:
                yield cast("IO[bytes]", unpacked)
        elif path.suffix == ".zst":
            import pyarrow

            # Arrow's own streams read no lines.
            with pyarrow.input_stream(str(path), compression="zstd") as stream, io.BufferedReader(stream) as file:
                yield file
        else:
            with path.open("rb") as file:
                yield file
    except (OSError, EOFError, zlib.error) as error:
        raise RowFileError(f"{path}: cannot be read: {error}") from error


def parsed(text: str | bytes) -> Any:
    """Parse JSON. NaN, which pandas writes for a missing value, reads as null.

    Raises:
        ValueError: it is not valid, or nothing that Python can hold; a JSONDecodeError or UnicodeDecodeError where that
            is the reason.
    """
    try:
        # Of bytes, json guesses the encoding: the first line of a UTF-16 file would pass for one.
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(decoded, parse_constant=_constant)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


def _constant(name: str) -> float | None:
    """The value of a word of JSON that only Python knows: NaN, Infinity or -Infinity."""
    return None if name == "NaN" else float(name)


def parse_line(path: Path, number: int, line: bytes) -> Row:
    """Parse a line of a JSON Lines file. A RowFileError names file and line."""
    try:
        row = parsed(line.rstrip(b"\r\n"))  # or a cut line is blamed on a column of the next one
    except json.JSONDecodeError as error:
        raise RowFileError(f"{path}:{number}: not valid JSON: {error.msg} (column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise RowFileError(f"{path}:{number}: not UTF-8 text (byte {error.start})") from error
    except ValueError as error:
        raise RowFileError(f"{path}:{number}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise RowFileError(f"{path}:{number}: not a JSON object")
    return row


def _read_json(path: Path) -> RowList:
    """A `.json` file: an array of objects, one object a line, or an object that holds nothing but such an array."""
    with opened(path) as file:
        head = file.read(_HEAD_BYTES)
        first = head.removeprefix(codecs.BOM_UTF8).lstrip()
        content = head + file.read() if first.startswith(b"[") or _is_open(first) else None
    if content is None:
        lines = JsonLines(path) if path.suffix == ".json" else ParsedRows(path, list(_numbered_lines(path)))
        return RowList(found, str(path)) if len(lines) == 1 and (found := _only_list(lines[0])) else lines
    try:
        rows = parsed(content)
    except json.JSONDecodeError as error:
        raise RowFileError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise RowFileError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except ValueError as error:
        raise RowFileError(f"{path}: not valid JSON: {error}") from error
    if isinstance(rows, dict):
        rows = _only_list(rows) or [rows]
    if not all(isinstance(row, dict) for row in rows):
        raise RowFileError(f"{path}: the array has entries that are not objects")
    return RowList(rows, str(path))


def _is_open(head: bytes) -> bool:
    """Whether a file begins with an object that goes on after the first line, as programs write it for people."""
    first, ended, _ = head.partition(b"\n")
    return (ended == b"\n" and first.rstrip() in (b"{", b"")) or first.rstrip().endswith((b"[", b"{", b","))


def _only_list(whole: Row) -> list[Any]:
    """The rows of an object whose only value is a list of objects, such as `{"data": [...]}`. Else none."""
    values = list(whole.values())
    is_list = len(values) == 1 and isinstance(values[0], list) and all(isinstance(each, dict) for each in values[0])
    return values[0] if is_list and not {"messages", "conversations"} & whole.keys() else []


def _numbered_lines(path: Path) -> Iterator[tuple[int, Row]]:
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, parse_line(path, number, line)


def _read_table(path: Path) -> RowList:
    if path.suffix in COMPRESSIONS or _has_bare_returns(path):
        return ParsedRows(path, list(_table_rows(path)))
    return TextTable(path)


def _has_bare_returns(path: Path) -> bool:
    """Whether lines may end with a carriage return alone, so that line feeds do not show where rows end."""
    with path.open("rb") as file:
        held = b""
        while block := file.read(_BLOCK_BYTES):
            held = held[-1:] + block
            if held.count(b"\r", 0, -1) > held.count(b"\r\n"):
                return True
    return held.endswith(b"\r")


def _table_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows of a CSV or TSV file with a header, as texts, with the line that each begins in or after."""
    delimiter = _delimiter_of(path)
    with opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as lines:
        numbered = _fields_of(path, lines, delimiter)
        _, header = next(numbered)
        yield from ((number, dict(zip(header, fields, strict=True))) for number, fields in numbered)


def _delimiter_of(path: Path) -> str:
    """What separates the fields of a CSV or TSV file: for CSV, what its first line has most of, outside of quotes.

    Excel writes semicolons where the comma is the decimal sign, and may name them in a line `sep=;` before the header.
    """
    if kind_of(path) == ".tsv":
        return "\t"
    with opened(path) as file:
        first = file.readline(_BLOCK_BYTES).decode("utf-8-sig", errors="replace").splitlines()[:1]
    header = _QUOTED.sub("", first[0]) if first else ""
    if (named := _SEP_LINE.fullmatch(header)) is not None:
        return named[1]
    return max(_SEPARATORS, key=header.count)


def _fields_of(path: Path, lines: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The fields of the header, then those of each row, with its line."""
    kind = kind_of(path)
    assert kind is not None
    table = _csv_reader(lines, delimiter)
    try:
        header = next(table, [])
        if _SEP_LINE.fullmatch(delimiter.join(header)):
            header = next(table, [])
        _check_header(path, header)
        yield 1, header
        before = table.line_num
        for fields in table:
            if len(fields) not in (0, len(header)):
                raise RowFileError(
                    f"{path}:{before + 1}: found {len(fields)} fields; the header has {len(header)}: "
                    f"{', '.join(header)}"
                )
            if fields:
                yield before + 1, fields
            before = table.line_num
    except csv.Error as error:
        raise RowFileError(f"{path}:{table.line_num}: not valid {kind[1:].upper()}: {error}") from error
    except UnicodeDecodeError as error:  # of a block that was read ahead
        raise RowFileError(f"{path}: not UTF-8 text, after line {table.line_num}") from error


def _check_header(path: Path, header: Sequence[str], line: int = 1) -> None:
    if repeated := next((name for name in header if name and header.count(name) > 1), None):
        raise RowFileError(f"{path}:{line}: the header names {repeated!r} more than once")


def excel_advice(path: Path) -> str | None:
    """What to install for an Excel file; None if it is none, or there is all that it takes."""
    if kind_of(path) != ".xlsx" or importlib.util.find_spec("openpyxl") is not None:
        return None
    return f"{path}: Excel files need the package openpyxl: install it with `uv sync --inexact --extra excel`"


def _read_excel(path: Path) -> RowList:
    """The first sheet of a workbook, as texts under the names in its first row, as CSV gives them."""
    if (advice := excel_advice(path)) is not None:
        raise RowFileError(advice)
    return ParsedRows(path, list(_excel_rows(path)))


def _excel_rows(path: Path) -> Iterator[tuple[int, Row]]:
    import openpyxl

    try:
        # data_only: the values of formulas, which Excel has stored.
        with closing(openpyxl.load_workbook(path, read_only=True, data_only=True)) as book:
            lines = enumerate(book.worksheets[0].iter_rows(values_only=True) if book.worksheets else (), start=1)
            numbered = ((number, [_cell_text(cell) for cell in cells]) for number, cells in lines)
            first, header = next(((number, cells) for number, cells in numbered if any(cells)), (1, []))
            while header and not header[-1]:
                header.pop()  # cells that are empty, but have a colour
            _check_header(path, header, first)
            for number, cells in numbered:
                if more := [cell for cell in cells[len(header) :] if cell]:
                    raise RowFileError(f"{path}:{number}: found {more[0]!r} in a column that has no name in the header")
                if any(cells):
                    filled = [*cells, *[""] * len(header)]
                    yield number, dict(zip(header, filled, strict=False))
    except (zipfile.BadZipFile, KeyError, ValueError, SyntaxError) as error:
        raise RowFileError(f"{path}: not an Excel file (.xlsx): {error}") from error


def _cell_text(value: object) -> str:
    """The text that stands for a cell in a CSV file with decimal points."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, datetime):
        return value.isoformat(" ") if value.time() != time() else value.date().isoformat()
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _csv_reader(lines: Iterable[str], delimiter: str) -> CsvReader:
    # Texts may be longer than the module's default limit of 128 KiB.
    csv.field_size_limit(_LONGEST_FIELD)
    return csv.reader(lines, delimiter=delimiter, strict=True)


def _read_parquet(path: Path) -> RowList:
    import pyarrow
    import pyarrow.parquet

    try:
        # The function read_table of pyarrow.parquet imports pandas.
        with pyarrow.parquet.ParquetFile(path) as file:
            return TableRows(file.read(), path)
    except (pyarrow.ArrowException, OSError) as error:
        raise RowFileError(f"{path}: not a Parquet file: {error}") from error


def _stream_parquet(path: Path) -> Iterator[StreamedRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise RowFileError(f"{path}: not a Parquet file: {error}") from error
    before = 0
    with file:
        for batch in file.iter_batches(batch_size=1024):
            rows = TableRows(pyarrow.Table.from_batches([batch]), path, before)
            yield from (StreamedRow(partial(rows.__getitem__, index), rows.where(index)) for index in range(len(rows)))
            before += len(rows)


def _read_arrow(path: Path) -> RowList:
    """An Arrow file of either kind: streamed, as `datasets` writes it, or with a footer."""
    import pyarrow

    if path.stat().st_size == 0:
        raise RowFileError(f"{path}: not an Arrow file: it is empty")
    with pyarrow.memory_map(str(path)) as source:
        for open_table in (pyarrow.ipc.open_stream, pyarrow.ipc.open_file):
            source.seek(0)
            try:
                return TableRows(open_table(source).read_all(), path)
            except (pyarrow.ArrowException, OSError):
                continue
    raise RowFileError(f"{path}: not an Arrow file")


_READERS: dict[str, Callable[[Path], RowList]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".json": _read_json,
    ".csv": _read_table,
    ".tsv": _read_table,
    ".txt": Documents,
    ".md": Documents,
    ".xlsx": _read_excel,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
