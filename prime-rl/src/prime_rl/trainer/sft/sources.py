"""Where SFT's rows come from: local files, directories, saved datasets, the hub; several of them interleaved.

Local JSON and Parquet files are read directly: importing `datasets` costs a second at every start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prime_rl.configs.sft import SFTDataConfig
from prime_rl.trainer.errors import DataError
from prime_rl.trainer.sft.source_files import Part, find_parts

if TYPE_CHECKING:
    import pyarrow

Rows = Sequence[Mapping[str, Any]]

_INTERLEAVE_SEED = 0
_DRAWS_AT_ONCE = 1000


def load_rows(config: SFTDataConfig) -> Rows:
    """The rows of `data.name`, in file order; several subsets or splits are interleaved.

    Raises:
        DataError: nothing there, nothing in it, or not readable.
    """
    parts = find_parts(config)
    loaded = [_load_part(part) for part in parts]
    for part, rows in zip(parts, loaded, strict=True):
        if len(rows) == 0:
            raise DataError(f"{part} has no rows")
    if len(loaded) == 1:
        return loaded[0]
    lengths = [len(rows) for rows in loaded]
    return InterleavedRows(loaded, interleave(lengths, config.probabilities, config.stopping_strategy))


def interleave(lengths: Sequence[int], probabilities: Sequence[float] | None, stopping_strategy: str) -> np.ndarray:
    """The order in which to read parts of the given lengths: [n, 2] pairs of part and row.

    Parts take turns, or are drawn with `probabilities` (always the same draws). `first_exhausted` ends as soon as one
    part has been read to its end, `all_exhausted` when all have, reading shorter ones again. The result is that of
    `datasets.interleave_datasets` with seed 0.
    """
    count = len(lengths)
    if probabilities is None:
        turns = min(lengths) if stopping_strategy == "first_exhausted" else max(lengths)
        rows = np.arange(turns)[:, None] % np.asarray(lengths)
        return np.stack([np.tile(np.arange(count), turns), rows.reshape(-1)], axis=1)
    enough = any if stopping_strategy == "first_exhausted" else all
    generator = np.random.default_rng(_INTERLEAVE_SEED)
    read, order = [0] * count, []
    while True:
        for part in generator.choice(count, size=_DRAWS_AT_ONCE, p=probabilities).tolist():
            order.append((part, read[part] % lengths[part]))
            read[part] += 1
            if enough(done >= length for done, length in zip(read, lengths, strict=True)):
                return np.array(order)


class InterleavedRows(Sequence):
    """Several row sequences read as one."""

    def __init__(self, parts: Sequence[Rows], order: np.ndarray) -> None:
        self.parts = parts
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        part, row = self.order[index]
        return self.parts[part][int(row)]


class TableRows(Sequence):
    """An Arrow table read row by row."""

    def __init__(self, table: pyarrow.Table) -> None:
        self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.table.slice(index, 1).to_pylist()[0]


def _load_part(part: Part) -> Rows:
    if part.is_saved:
        return _load_saved(Path(part.name).expanduser(), part.split)
    if not part.files:
        return _load_with_datasets(part.name, part.subset, part.split)
    if len(part.files) == 1:
        return _READERS[part.files[0].suffix](part.files[0])
    return [row for file in part.files for row in _READERS[file.suffix](file)]


def _load_saved(directory: Path, split: str) -> Rows:
    """A directory written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    import datasets

    saved = datasets.load_from_disk(str(directory))
    if isinstance(saved, datasets.Dataset):
        return saved
    if split not in saved:
        raise DataError(f"data.name = {directory} has no split {split}; it has {', '.join(saved)}")
    return saved[split]


def _load_with_datasets(name: str, subset: str | None, split: str) -> Rows:
    import datasets

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"data.name = {name}: no such file, and not loadable from the hub: {reason}") from error


def _read_json(path: Path) -> Rows:
    """A `.json` file: one array of objects, or one object a line."""
    text = path.read_text(encoding="utf-8")
    if not text.lstrip().startswith("["):
        return list(_parse_lines(path, text))
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: the array has entries that are no objects")
    return rows


def _read_jsonl(path: Path) -> Rows:
    return list(_parse_lines(path, path.read_text(encoding="utf-8")))


def _parse_lines(path: Path, text: str) -> Iterator[dict[str, Any]]:
    # Not `splitlines`, which also splits at characters that JSON strings may hold as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not valid JSON: {error.msg} (column {error.colno})") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: not a JSON object")
        yield row


def _read_parquet(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        return TableRows(pyarrow.parquet.read_table(path))
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error


def _read_arrow(path: Path) -> Rows:
    """An Arrow file of either kind: streamed, as `datasets` writes it, or with a footer."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        for open_table in (pyarrow.ipc.open_stream, pyarrow.ipc.open_file):
            source.seek(0)
            try:
                return TableRows(open_table(source).read_all())
            except pyarrow.ArrowInvalid:
                continue
    raise DataError(f"{path}: not an Arrow file")


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
