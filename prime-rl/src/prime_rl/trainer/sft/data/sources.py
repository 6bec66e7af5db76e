"""Opens the dataset `data.name`: files, a saved dataset, or a hub dataset, with one part per subset and split."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from prime_rl.checks.data_files import Part
from prime_rl.checks.data_files import find_parts as files_of_parts
from prime_rl.checks.start_dir import StartFault
from prime_rl.configs.sft import SFTDataConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.sft.data.row_files import Row, RowList, read_file, stream_file


def find_parts(config: SFTDataConfig) -> list[Part]:
    """Find the parts that `data.subsets` and `data.splits` choose, without reading any file.

    Raises:
        DataError: there is nothing at the path, or it has no such split.
    """
    try:
        return files_of_parts(config)
    except StartFault as fault:
        raise DataError(str(fault)) from fault


Reading = Callable[[], Row]
"""Reads and parses one row."""

_INTERLEAVE_SEED = 0
_DRAWS_AT_ONCE = 1000


def load_rows(config: SFTDataConfig) -> RowList:
    """Load the rows of `data.name` in file order; several subsets or splits are interleaved.

    Raises:
        DataError: the dataset is missing, empty or unreadable.
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


def stream_rows(config: SFTDataConfig) -> Iterator[Reading]:
    """Stream the rows of one epoch in the same order.

    Raises:
        DataError: the dataset is missing, empty or unreadable.
    """
    parts = [partial(_stream_part, part) for part in find_parts(config)]
    if len(parts) == 1:
        return parts[0]()
    return interleave_streams(parts, config.probabilities, config.stopping_strategy)


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
    enough = any if stopping_strategy == "first_exhausted" else all
    read, order = [0] * count, []
    for part in _draws(count, probabilities):
        order.append((part, read[part] % lengths[part]))
        read[part] += 1
        if enough(done >= length for done, length in zip(read, lengths, strict=True)):
            break
    return np.array(order)


def interleave_streams(
    parts: Sequence[Callable[[], Iterator[Reading]]], probabilities: Sequence[float] | None, stopping_strategy: str
) -> Iterator[Reading]:
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
        yield from range(count) if probabilities is None else _draw(generator, count, probabilities)


def _draw(generator: np.random.Generator, count: int, probabilities: Sequence[float]) -> list[int]:
    return generator.choice(count, size=_DRAWS_AT_ONCE, p=probabilities).tolist()


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


def _load_part(part: Part) -> RowList:
    if part.is_saved:
        return RowList(_load_saved(part), str(part))
    if not part.files:
        return RowList(_load_from_hub(part, streaming=False), str(part))
    if len(part.files) == 1:
        return read_file(part.files[0])
    return JoinedRows([read_file(file) for file in part.files])


def _stream_part(part: Part) -> Iterator[Reading]:
    count = 0
    for reading in _readings(part):
        yield reading
        count += 1
    if count == 0:
        raise DataError(f"{part} has no rows")


def _readings(part: Part) -> Iterator[Reading]:
    if part.is_saved:
        rows = _load_saved(part)
        yield from (partial(rows.__getitem__, index) for index in range(len(rows)))
    elif not part.files:
        yield from (partial(dict, row) for row in _load_from_hub(part, streaming=True))
    else:
        for file in part.files:
            yield from stream_file(file)


def _load_saved(part: Part) -> Sequence[Row]:
    """A directory written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    import datasets

    saved = datasets.load_from_disk(str(Path(part.name).expanduser()))
    if isinstance(saved, datasets.Dataset):
        return saved
    if part.split not in saved:
        raise DataError(f"data.name = {part.name} has no split {part.split}; it has {', '.join(saved)}")
    return saved[part.split]


def _load_from_hub(part: Part, streaming: bool) -> Any:
    import datasets

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(part.name, part.subset, split=part.split, streaming=streaming)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"data.name = {part.name}: no such file, and not loadable from the hub: {reason}") from error
