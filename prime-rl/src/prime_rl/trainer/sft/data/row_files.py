"""Reads rows of local files on demand.

Files are read without `datasets`, whose import adds a second to every start.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.trainer.process.errors import DataError

if TYPE_CHECKING:
    import pyarrow

Row = Mapping[str, Any]


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


class TableRows(RowList):
    """An Arrow table read row by row."""

    def __init__(self, table: pyarrow.Table, path: Path) -> None:
        super().__init__((), str(path))
        self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: int) -> Row:
        return self.table.slice(index, 1).to_pylist()[0]


def read_file(path: Path) -> RowList:
    """Read all rows of a file. Raises DataError if its content does not match its suffix."""
    return _READERS[path.suffix](path)


def stream_file(path: Path) -> Iterator[Callable[[], Row]]:
    """Yield a function that parses each row, in order. Only a small part of the file is in memory.

    Raises:
        DataError: its content does not match its suffix.
    """
    if path.suffix == ".parquet":
        yield from _stream_parquet(path)
    elif path.suffix in (".jsonl", ".ndjson"):
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield partial(parse_line, path, number, line)
    else:
        rows = read_file(path)
        yield from (partial(rows.__getitem__, index) for index in range(len(rows)))


def parse_line(path: Path, number: int, line: bytes) -> Row:
    """Parse a line of a JSON Lines file. A DataError names file and line."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{number}: not valid JSON: {error.msg} (column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: not UTF-8 text (byte {error.start})") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number}: not a JSON object")
    return row


def _read_json(path: Path) -> RowList:
    """A `.json` file: one array of objects, or one object a line."""
    with path.open("rb") as file:
        if not file.read(1024).lstrip().startswith(b"["):
            return JsonLines(path)
    try:
        rows = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start})") from error
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: the array has entries that are not objects")
    return RowList(rows, str(path))


def _read_parquet(path: Path) -> RowList:
    import pyarrow
    import pyarrow.parquet

    try:
        return TableRows(pyarrow.parquet.read_table(path), path)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error


def _stream_parquet(path: Path) -> Iterator[Callable[[], Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error
    with file:
        for batch in file.iter_batches(batch_size=1024):
            rows = TableRows(pyarrow.Table.from_batches([batch]), path)
            yield from (partial(rows.__getitem__, index) for index in range(len(rows)))


def _read_arrow(path: Path) -> RowList:
    """An Arrow file of either kind: streamed, as `datasets` writes it, or with a footer."""
    import pyarrow

    if path.stat().st_size == 0:
        raise DataError(f"{path}: not an Arrow file: it is empty")
    with pyarrow.memory_map(str(path)) as source:
        for open_table in (pyarrow.ipc.open_stream, pyarrow.ipc.open_file):
            source.seek(0)
            try:
                return TableRows(open_table(source).read_all(), path)
            except pyarrow.ArrowInvalid:
                continue
    raise DataError(f"{path}: not an Arrow file")


_READERS: dict[str, Callable[[Path], RowList]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
