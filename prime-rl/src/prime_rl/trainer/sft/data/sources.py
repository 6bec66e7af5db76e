"""Opens the datasets of `data` and reads their rows endlessly, in an order that is the same on every process.

A source is a file, a saved dataset or a hub dataset. Each source, or subset and split, is a part. Each epoch is
shuffled with its own seed.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from prime_rl.checks.data_files import Part
from prime_rl.checks.data_files import find_parts as files_of_parts
from prime_rl.configs.data import RowFormatConfig, SFTDataConfig, Split
from prime_rl.run.process import own_beats
from prime_rl.storage.staging import folder_of
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.sft.data.messages import check_columns, renamed
from prime_rl.trainer.sft.data.pairs import SIDES, labelled_of
from prime_rl.utils.conversations import PlainText, RowFault, read_row
from prime_rl.utils.errors import RowFileError, StartFault
from prime_rl.utils.logger import count_of
from prime_rl.utils.rows import Row, RowList, StreamedRow, read_file, stream_file, undecoded, without_fills


def find_parts(config: SFTDataConfig) -> list[Part]:
    """Find the parts that `data` names, without reading any file.

    Raises:
        DataError: there is nothing at the path, or it has no such split.
    """
    try:
        return files_of_parts(config)
    except StartFault as fault:
        raise DataError(str(fault)) from fault


_INTERLEAVE_SEED = 0
_DRAWS_AT_ONCE = 1000
_OTHERS = 16
"""Rows at random that are tried for one with another prompt."""


def load_rows(config: SFTDataConfig) -> RowList:
    """Load the rows of `data` in file order; those of several sources, subsets or splits are interleaved.

    Raises:
        DataError: the dataset is missing, empty or unreadable.
    """
    loaded = [_load_part(part) for part in find_parts(config)]
    if config.split is not None:
        loaded = side_of(loaded, config.split, config.label)
        if config.split.is_validation:
            return JoinedRows(loaded)  # each row once, whatever the shares in training are
    if len(loaded) == 1:
        return loaded[0]
    lengths = [len(rows) for rows in loaded]
    return InterleavedRows(loaded, interleave(lengths, config.shares, config.stopping_strategy))


def stream_rows(config: SFTDataConfig) -> Iterator[StreamedRow]:
    """Stream the rows of one epoch in the same order.

    Raises:
        DataError: the dataset is missing, empty or unreadable.
    """
    parts = [partial(_stream_part, part) for part in find_parts(config)]
    if len(parts) == 1:
        return parts[0]()
    return interleave_streams(parts, config.shares, config.stopping_strategy)


def interleave(lengths: Sequence[int], probabilities: Sequence[float] | None, stopping_strategy: str) -> np.ndarray:
    """The order in which to read parts of the given lengths: [n, 2] pairs of part and row.

    Parts take turns, or are drawn with `probabilities` from a fixed seed. `first_exhausted` ends when the first part
    ends; `all_exhausted` repeats shorter parts until all have ended. The result equals
    `datasets.interleave_datasets` with seed 0.
    """
    count = len(lengths)
    if probabilities is None:
        turns = min(lengths) if stopping_strategy == "first_exhausted" else max(lengths)
        rows = np.arange(turns)[:, None] % np.asarray(lengths)
        return np.stack([np.tile(np.arange(count), turns), rows.reshape(-1)], axis=1)
    enough, last = (np.any, min) if stopping_strategy == "first_exhausted" else (np.all, max)
    generator = np.random.default_rng(_INTERLEAVE_SEED)
    drawn, read = [], np.zeros(count, dtype=np.int64)
    # In arrays: with a small share of a large part, an epoch has many more rows than the parts have together.
    while not enough(read >= np.asarray(lengths)):
        drawn.append(_draw(generator, count, probabilities).astype(np.int32))
        read += np.bincount(drawn[-1], minlength=count)
    parts = np.concatenate(drawn)
    draws_of = [np.flatnonzero(parts == part) for part in range(count)]
    ends = [int(draws[length - 1]) for draws, length in zip(draws_of, lengths, strict=True) if len(draws) >= length]
    order = np.stack([parts, np.empty_like(parts)], axis=1)
    for draws, length in zip(draws_of, lengths, strict=True):
        order[draws, 1] = np.arange(len(draws)) % length
    return order[: last(ends) + 1]


def interleave_streams(
    parts: Sequence[Callable[[], Iterator[StreamedRow]]], probabilities: Sequence[float] | None, stopping_strategy: str
) -> Iterator[StreamedRow]:
    """Like `interleave`, for parts of unknown length."""
    enough = any if stopping_strategy == "first_exhausted" else all
    streams = [part() for part in parts]
    # Read one row ahead: the end of a part must be known as soon as its last row has been taken.
    ahead = [next(stream) for stream in streams]
    ended = [False] * len(parts)
    turns = _draws(len(parts), probabilities)
    for taken, part in enumerate(turns, start=1):
        yield ahead[part]
        following = next(streams[part], None)
        if following is None:
            ended[part] = True
            streams[part] = parts[part]()
            following = next(streams[part])
        ahead[part] = following
        is_round_over = probabilities is not None or taken % len(parts) == 0
        if is_round_over and enough(ended):
            return


def _draws(count: int, probabilities: Sequence[float] | None) -> Iterator[int]:
    generator = np.random.default_rng(_INTERLEAVE_SEED)
    while True:
        yield from range(count) if probabilities is None else _draw(generator, count, probabilities).tolist()


def _draw(generator: np.random.Generator, count: int, probabilities: Sequence[float]) -> np.ndarray:
    return generator.choice(count, size=_DRAWS_AT_ONCE, p=probabilities)


class InterleavedRows(RowList):
    """Several row lists, interleaved."""

    def __init__(self, parts: Sequence[RowList], order: np.ndarray) -> None:
        super().__init__((), "")
        self.parts = parts
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Row:
        part, row = self.order[index]
        return self.parts[part][int(row)]

    def where(self, index: int) -> str:
        part, row = self.order[index]
        return self.parts[part].where(int(row))


class JoinedRows(RowList):
    """Several row lists, concatenated."""

    def __init__(self, parts: Sequence[RowList]) -> None:
        super().__init__((), "")
        self.parts = parts
        self.ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Row:
        part, row = self._find(index)
        return part[row]

    def where(self, index: int) -> str:
        part, row = self._find(index)
        return part.where(row)

    def _find(self, index: int) -> tuple[RowList, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        at = bisect_right(self.ends, index)
        return self.parts[at], index - (self.ends[at - 1] if at else 0)


class ColumnarRows(RowList):
    """Rows of `datasets`, which gives all nested objects of a column the same keys, as Arrow does."""

    def __getitem__(self, index: int) -> Row:
        return without_fills(self.rows[index])


class ChosenRows(RowList):
    """Some rows of a list."""

    def __init__(self, rows: RowList, chosen: np.ndarray) -> None:
        super().__init__((), "")
        self.original = rows
        self.chosen = chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Row:
        return self.original[int(self.chosen[index])]

    def where(self, index: int) -> str:
        return self.original.where(int(self.chosen[index]))


def side_of(parts: Sequence[RowList], split: Split, label: str) -> list[RowList]:
    """The rows of each part that belong to one side of a split, in order. Parts without any are left out.

    Rows with the same prompt get the same number, whatever part or format they come from, and the smallest numbers are
    held out. Neither the order of the rows nor the rows around one change its number.

    Raises:
        DataError: one of the sides would have no rows.
    """
    numbers = [_split_numbers(rows, split.seed) for rows in parts]
    values, counts = np.unique(np.concatenate(numbers), return_counts=True)
    if split.size is None:
        assert split.fraction is not None
        held_out = values[values < split.fraction * 2.0**64]
    else:
        held_out = values[_fitting(counts, split.size)]
    total, held = int(counts.sum()), int(counts[np.isin(values, held_out)].sum())
    if held in (0, total):
        side = "no row for validation" if held == 0 else "no row to train on"
        raise DataError(
            f"{label}: {split} leaves {side}: there are {count_of('row', total)} with "
            f"{count_of('different prompt', len(values))}, and rows with the same prompt stay together"
        )
    chosen = (np.flatnonzero(np.isin(each, held_out) == split.is_validation) for each in numbers)
    return [ChosenRows(rows, places) for rows, places in zip(parts, chosen, strict=True) if len(places)]


def _fitting(counts: np.ndarray, size: int) -> list[int]:
    """The first groups that have at most `size` rows together. A group that is too large is passed over."""
    taken: list[int] = []
    for index, count in enumerate(counts.tolist()):
        if count <= size:
            taken.append(index)
            size -= count
    return taken


def _split_numbers(rows: RowList, seed: int) -> np.ndarray:
    """A number in [0, 2**64) for each row, from the seed and the row's prompt."""
    numbers = np.empty(len(rows), dtype=np.uint64)
    for index in range(len(rows)):
        own_beats().tick()
        text = f"{seed}\0{prompt_of(rows[index])}".encode(errors="surrogatepass")
        numbers[index] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return numbers


def prompt_of(row: Row) -> str:
    """What identifies a conversation in a split: all before its first answer, or the whole text if it has no answer.

    Blanks do not count. A row that cannot be read is identified by its content.
    """
    try:
        is_preference = all(name in row for name in SIDES) or isinstance(row.get("label"), bool)
        content = read_row(labelled_of(row)[0][0] if is_preference else row, with_images=True)
    except RowFault:
        return json.dumps(row, sort_keys=True, default=str)
    if isinstance(content, PlainText):
        return " ".join((content.prompt or "").split()) or " ".join(content.completion.split())
    roles = [message["role"] for message in content.messages]
    first = roles.index("user") if "user" in roles else 0
    end = next((at for at, role in enumerate(roles) if role == "assistant" and at >= first), len(roles))
    asked = content.messages[: end or len(roles)]
    return json.dumps([[each["role"], " ".join(str(each.get("content")).split())] for each in asked])


class RenamedRows(RowList):
    """Rows with the columns of `data.columns` and the roles of `data.roles` under our names."""

    def __init__(self, rows: RowList, config: RowFormatConfig, folder: Path) -> None:
        super().__init__((), "")
        self.original = rows
        self.config = config
        self.folder = folder

    def __len__(self) -> int:
        return len(self.original)

    def __getitem__(self, index: int) -> Row:
        with _told():
            row = self.original[index]
        return renamed(row, self.config, self.folder)

    def where(self, index: int) -> str:
        return self.original.where(index)


def _load_part(part: Part) -> RowList:
    loaded = _load_rows(part)
    rows = loaded[0] if len(loaded) == 1 else JoinedRows(loaded)
    if len(rows) == 0:
        raise DataError(f"{part} has no rows")
    check_columns(part, next(each for each in loaded if len(each)).original[0])
    return rows


def _load_rows(part: Part) -> list[RenamedRows]:
    if part.is_saved:
        return [RenamedRows(ColumnarRows(_load_saved(part), str(part)), part.format, _folder(part))]
    if not part.files:
        rows = ColumnarRows(undecoded(_load_from_hub(part, streaming=False)), str(part))
        return [RenamedRows(rows, part.format, _folder(part))]
    with _told():
        return [RenamedRows(read_file(file), part.format, folder_of(file)) for file in part.files]


@contextmanager
def _told() -> Iterator[None]:
    """A file that cannot be read is an error of the trainer."""
    try:
        yield
    except RowFileError as error:
        raise DataError(str(error)) from error


def _stream_part(part: Part) -> Iterator[StreamedRow]:
    count = 0
    for folder, reading in _readings(part):
        if count == 0:
            with _told():
                check_columns(part, reading())
        yield StreamedRow(partial(_renamed_reading, reading, part.format, folder), reading.where)
        count += 1
    if count == 0:
        raise DataError(f"{part} has no rows")


def _renamed_reading(reading: StreamedRow, config: RowFormatConfig, folder: Path) -> Row:
    with _told():
        row = reading()
    return renamed(row, config, folder)


def _readings(part: Part) -> Iterator[tuple[Path, StreamedRow]]:
    """Each row, and the folder where paths of its images begin."""
    if part.is_saved:
        rows = ColumnarRows(_load_saved(part), str(part))
        for at in range(len(rows)):
            yield _folder(part), StreamedRow(partial(rows.__getitem__, at), rows.where(at))
    elif not part.files:
        stream = _load_from_hub(part, streaming=True).decode(False)
        for at, row in enumerate(stream):
            yield _folder(part), StreamedRow(partial(without_fills, row), f"{part}, row {at}")
    else:
        for file in part.files:
            folder = folder_of(file)
            with _told():
                for reading in stream_file(file):
                    yield folder, reading


def _folder(part: Part) -> Path:
    """The folder of a dataset; of one of the hub, that in which the run starts."""
    return Path(part.name) if part.is_saved else Path()


def _load_saved(part: Part) -> Sequence[Row]:
    """A directory written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    import datasets

    saved = datasets.load_from_disk(part.name)
    if isinstance(saved, datasets.Dataset):
        return undecoded(saved)
    if part.split not in saved:
        raise DataError(f"{part.key} = {part.name} has no split {part.split}; it has {', '.join(saved)}")
    return undecoded(saved[part.split])


def _load_from_hub(part: Part, streaming: bool) -> Any:
    import datasets

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(part.name, part.subset, split=part.split, streaming=streaming)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{part.key} = {part.name}: no such file, and it could not be loaded from the hub: {reason}"
        ) from error


@dataclass(frozen=True, slots=True)
class Entry:
    """One position of the sequence."""

    read: Callable[[], Row]
    where: str
    """File and line, or dataset and row, for messages."""
    key: int | None = None
    """Identifies the row in every epoch. None if rows are streamed."""
    others: Callable[[], Iterator[Row]] = lambda: iter(())
    """Other rows, in an order that is the same in every epoch: the one before it in the data, then some at random."""


class Entries(Protocol):
    row_count: int
    """Number of rows per epoch; 0 while it is unknown."""

    def at(self, position: int) -> Entry:
        """The entry at a position. Callers ask in increasing order."""

    def row(self, key: int) -> Entry:
        """The entry with this key."""

    def epoch_of(self, position: int) -> int: ...

    def state(self) -> dict[str, Any]:
        """How far reading has come."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after the last position that was read when `state` was returned."""


class LoadedEntries:
    """Random access to all rows of a dataset, which are shuffled together."""

    def __init__(self, config: SFTDataConfig) -> None:
        self.config = config
        self.rows = load_rows(config)
        self.row_count = len(self.rows)
        self._order: tuple[int, np.ndarray] | None = None

    def at(self, position: int) -> Entry:
        return self.row(self._row_index(position))

    def row(self, key: int) -> Entry:
        def read() -> Row:
            return self.rows[key]

        def others() -> Iterator[Row]:
            count = self.row_count
            drawn = np.random.default_rng(key).integers(0, count, size=_OTHERS).tolist()
            yield from (self.rows[each] for each in ((key - 1) % count, *drawn) if each != key)

        return Entry(read, self.rows.where(key), key, others)

    def epoch_of(self, position: int) -> int:
        return position // self.row_count

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to do: a position determines its row."""

    def _row_index(self, position: int) -> int:
        epoch, offset = divmod(position, self.row_count)
        if not self.config.shuffle:
            return offset
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng(self.config.seed + epoch)
            self._order = epoch, generator.permutation(self.row_count)
        return int(self._order[1][offset])


class StreamedEntries:
    """Reads rows in order and shuffles them in blocks of `shuffle_buffer`. The first epoch's end reveals its length."""

    def __init__(self, config: SFTDataConfig) -> None:
        self.config = config
        self.row_count = 0
        self._epoch = 0
        self._epoch_start = 0
        self._block_start = 0
        self._block: list[StreamedRow] = []
        self._rows: Iterator[StreamedRow] = stream_rows(config)
        self._read_block()

    def at(self, position: int) -> Entry:
        if position < self._block_start:
            raise ValueError(f"position {position} is before {self._block_start}, where the stream is now")
        while position >= self._block_start + len(self._block):
            self._block_start += len(self._block)
            self._read_block()
        row = self._block[position - self._block_start]
        return Entry(row, row.where)

    def row(self, key: int) -> Entry:
        raise DataError(f"{self.config.label} is streamed, and the checkpoint is of rows that were not")

    def epoch_of(self, position: int) -> int:
        """The current epoch, since the start of the next one is unknown."""
        return self._epoch

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "epoch_start": self._epoch_start, "block_start": self._block_start}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._epoch_start, self._block_start = (state[k] for k in ("epoch", "epoch_start", "block_start"))
        self._rows = islice(stream_rows(self.config), self._block_start - self._epoch_start, None)
        self._read_block()

    def _read_block(self) -> None:
        """Read the block that starts at `_block_start`, from the next epoch if this one is over."""
        block = list(islice(self._rows, self.config.shuffle_buffer))
        if not block:
            self.row_count = self._block_start - self._epoch_start
            if self.row_count <= 0:
                raise DataError(f"{self.config.label} has fewer rows than when the checkpoint was saved")
            self._epoch += 1
            self._epoch_start = self._block_start
            self._rows = stream_rows(self.config)
            block = list(islice(self._rows, self.config.shuffle_buffer))
        if self.config.shuffle:
            seed = (self.config.seed + self._epoch, self._block_start - self._epoch_start)
            order = np.random.default_rng(seed).permutation(len(block))
            block = [block[index] for index in order]
        self._block = block


def setup_entries(config: SFTDataConfig) -> Entries:
    """Open the datasets of `data`, loaded or streamed.

    Raises:
        DataError: it is missing, empty or unreadable.
    """
    return StreamedEntries(config) if config.streaming else LoadedEntries(config)
