"""Endless sequence of dataset rows, the same on every process. Each epoch is shuffled with its own seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from prime_rl.configs.sft import SFTDataConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.sft.data.sources import load_rows, stream_rows
from prime_rl.utils.rows import Row, StreamedRow


@dataclass(frozen=True, slots=True)
class Entry:
    """One position of the sequence."""

    read: Callable[[], Row]
    where: str
    """File and line, or dataset and row, for messages."""
    key: int | None = None
    """Identifies the row in every epoch. None if rows are streamed."""


class Entries(Protocol):
    row_count: int
    """Number of rows per epoch; 0 while it is unknown."""

    def at(self, position: int) -> Entry:
        """The entry at a position. Callers ask in increasing order."""

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
        index = self._row_index(position)

        def read() -> Row:
            return self.rows[index]

        return Entry(read, self.rows.where(index), index)

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
