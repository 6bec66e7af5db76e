"""Packs samples into rows of fixed length. Samples in a row do not attend to each other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from prime_rl.configs.data import STACK_MULTIPLE, BaseDataConfig, FakeDataConfig, SFTDataConfig, batch_fault
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.sft.data.conversation import TokenizedSample
from prime_rl.trainer.sft.data.pairs import Labelled, Pair
from prime_rl.trainer.sft.data.places import Place, redistribute, saved_data_size
from prime_rl.trainer.sft.data.samples import (
    DatasetStream,
    FakeStream,
    Sample,
    SampleSource,
    SampleStream,
    as_bytes,
    from_bytes,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prime_rl.trainer.model.images import Images
    from prime_rl.trainer.process.mesh import DataAxis


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Assign each of n lengths to a bin, each to the fullest bin that has room for it.

    Those above a quarter of the capacity are placed first, the longest of them first: of them alone, best-fit
    decreasing makes at most 11/9 of the optimal number of bins, plus 4 (Johnson et al. 1974). The others keep their
    order, and open a bin only when all but one are three quarters full. Sorted, they would fill bins with samples of
    one length, and so steps with one kind of answer.

    Bins are grouped by their free room, and the bits of one integer say which rooms exist. Finding the smallest
    sufficient room is then a shift and the lowest set bit: capacity / 64 machine words per sample, after sorting.

    Raises:
        ValueError: a length exceeds `capacity`.
    """
    bins = np.empty(len(lengths), dtype=np.int64)
    if len(lengths) == 0:
        return bins
    if int(lengths.max()) > capacity:
        raise ValueError(f"length {int(lengths.max())} exceeds the capacity of {capacity}")
    with_room: dict[int, list[int]] = {}
    rooms, count = 0, 0
    order = np.argsort(-np.where(4 * lengths > capacity, lengths, 0), kind="stable")
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            same_room = with_room[room]
            chosen = same_room.pop()
            if not same_room:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, count
            count += 1
        bins[index] = chosen
        left = room - length
        if left:
            with_room.setdefault(left, []).append(chosen)
            rooms |= 1 << left
    return bins


_WINDOW_SAMPLES = 1024
"""Samples that `best_fit` packs at once, within `_WINDOW_TOKENS`. More fill rows better but delay the start."""
_WINDOW_ROWS = 16
"""Minimum number of rows to pack at once, within `_WINDOW_TOKENS`."""
_WINDOW_TOKENS = 2**20
_STALE_AFTER = 10
"""`stack` flushes a bucket that has received no sample for this many rows."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """T tokens: several samples, then padding. Arrays have shape [T]."""

    input_ids: np.ndarray
    target_ids: np.ndarray
    """The next token of the same sample."""
    is_trained: np.ndarray
    """True where the target counts in the loss."""
    position_ids: np.ndarray
    """Position within the sample."""
    samples: int
    """Number of samples in the row. The last one may be cut."""
    padding: int = 0
    """Number of padding tokens. Padding forms its own sequences, which are not trained."""
    members: tuple[Sample, ...] = ()
    """The samples. The row holds the sequences of the first, then those of the second."""

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The samples, if they are pairs: chosen and rejected sequence of the first, then of the second."""
        return tuple(each for each in self.members if isinstance(each, Pair))

    @property
    def sequences(self) -> tuple[TokenizedSample, ...]:
        """The sequences that the row holds, in order. The last one may be cut in the row."""
        return tuple(sequence for sample in self.members for sequence in sample.packed)

    @property
    def labelled(self) -> tuple[Labelled, ...]:
        """The samples, if they are answers with labels."""
        return tuple(each for each in self.members if isinstance(each, Labelled))

    @property
    def tokens(self) -> int:
        """Number of tokens that belong to samples."""
        return len(self.input_ids) - self.padding


def lay_out(samples: Sequence[Sample], row_tokens: int, seq_len: int) -> PackedRow:
    """Concatenate samples, cut or padded to `row_tokens`. Padding consists of sequences of at most `seq_len` tokens."""
    padding = max(0, row_tokens - sum(sample.inputs for sample in samples))
    sequences = [each for sample in samples for each in sample.packed]
    zeros = np.zeros(padding, dtype=np.int64)
    # Not token 0, by which most models pad: its embedding may be zeros, and of those alone Gemma 3n has no gradient.
    padding_ids = np.ones(padding, dtype=np.int64)

    def joined(parts: Iterable[np.ndarray], behind: np.ndarray, dtype: type = np.int64) -> np.ndarray:
        return np.concatenate([*parts, behind], dtype=dtype)[:row_tokens]

    return PackedRow(
        input_ids=joined((each.token_ids[:-1] for each in sequences), padding_ids),
        target_ids=joined((each.token_ids[1:] for each in sequences), zeros),
        is_trained=joined((each.is_trained[1:] for each in sequences), zeros.astype(bool), bool),
        position_ids=joined((np.arange(each.inputs) for each in sequences), np.arange(padding) % seq_len),
        samples=len(samples),
        padding=padding,
        members=tuple(samples),
    )


class Packer(Protocol):
    """Chooses the samples of each row from a stream. Samples that wait for a later row are its state."""

    def __call__(self, stream: SampleSource) -> Sequence[Sample]:
        """The samples of the next row."""

    def state(self) -> dict[str, Any]:
        """The waiting samples, as plain values and bytes."""

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Cat:
    """Fills a row with samples in order. The rest of the last sample is discarded, so none waits."""

    def __init__(self, row_tokens: int) -> None:
        self.row_tokens = row_tokens

    def __call__(self, stream: SampleSource) -> Sequence[Sample]:
        samples, total = [], 0
        while total < self.row_tokens:
            samples.append(next(stream))
            total += samples[-1].inputs
        return samples

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to do."""


class BestFit:
    """Fills rows with whole samples, chosen from a window of the stream by `best_fit`.

    A window ends with the epoch or when it is large enough. Its emptiest row waits for the next window. Rows are
    shuffled, because packing sorts them by their longest sample.
    """

    def __init__(self, row_tokens: int) -> None:
        self.row_tokens = row_tokens
        self.rows: list[list[Sample]] = []
        self.held_back: list[list[Sample]] = []
        """Rows that wait for the next window: one, or several after the number of data ranks has changed."""

    def __call__(self, stream: SampleSource) -> Sequence[Sample]:
        if not self.rows:
            self._pack_window(stream)
        return self.rows.pop()

    def _pack_window(self, stream: SampleSource) -> None:
        seed, epoch, count = stream.position, stream.epoch, 0
        # A row that waited counts as one long item, so that its samples, which are short, are placed first.
        items = list(self.held_back)
        total = sum(sample.inputs for item in items for sample in item)
        while total < self.row_tokens or not (stream.epoch > epoch or self._is_enough(count, total)):
            items.append([next(stream)])
            count += 1
            total += items[-1][0].inputs
        lengths = np.array([sum(sample.inputs for sample in item) for item in items])
        bins = best_fit(lengths, self.row_tokens)
        rows: list[list[Sample]] = [[] for _ in range(int(bins.max()) + 1)]
        for item, at in zip(items, bins.tolist(), strict=True):
            rows[at] += item
        self.held_back = []
        if len(rows) > 1:
            self.held_back = [rows.pop(int(np.argmin(np.bincount(bins, weights=lengths))))]
        order = np.random.default_rng(seed).permutation(len(rows))
        self.rows = [rows[index] for index in order]

    def _is_enough(self, samples: int, tokens: int) -> bool:
        return tokens >= _WINDOW_TOKENS or (samples >= _WINDOW_SAMPLES and tokens >= _WINDOW_ROWS * self.row_tokens)

    def state(self) -> dict[str, Any]:
        return {"rows": _rows_as_bytes(self.rows), "held_back": _rows_as_bytes(self.held_back)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.rows, self.held_back = _rows_from_bytes(state["rows"]), _rows_from_bytes(state["held_back"])


class Stack:
    """Fills rows with samples of similar length: a row has slots of equal size, one per sample.

    Slot sizes are the row's length, half of it, a quarter and so on, in multiples of `STACK_MULTIPLE`. A sample waits
    in the bucket of the smallest slot that holds it until the bucket fills a row. A bucket that has received no sample
    for `_STALE_AFTER` rows moves up to larger slots while they fit, and its row is emitted with free slots.
    """

    def __init__(self, row_tokens: int) -> None:
        self.row_tokens = row_tokens
        self.buckets: dict[int, list[Sample]] = {row_tokens: []}
        size = row_tokens
        while size % (2 * STACK_MULTIPLE) == 0:
            size //= 2
            self.buckets[size] = []
        self.touched_at = dict.fromkeys(self.buckets, 0)
        self.emitted = 0
        self.ready: list[list[Sample]] = []
        """Rows that became full when the number of data ranks changed."""

    def __call__(self, stream: SampleSource) -> Sequence[Sample]:
        samples = self.ready.pop() if self.ready else self._stale()
        while samples is None:
            samples = self._take_in(next(stream))
        self.emitted += 1
        return samples

    def _take_in(self, sample: Sample) -> list[Sample] | None:
        """Add a sample to its bucket. Returns the bucket's samples if they fill a row."""
        size = min(size for size in self.buckets if size >= sample.inputs)
        self.buckets[size].append(sample)
        self.touched_at[size] = self.emitted
        return self._emptied(size) if len(self.buckets[size]) * size >= self.row_tokens else None

    def _stale(self) -> list[Sample] | None:
        """The samples of the smallest stale bucket and of the larger ones that it moves through, if one is stale."""
        for size in sorted(self.buckets):
            if self.buckets[size] and self.emitted - self.touched_at[size] > _STALE_AFTER:
                samples = self._emptied(size)
                while 2 * size in self.buckets:
                    size *= 2
                    if (len(samples) + len(self.buckets[size])) * size > self.row_tokens:
                        break
                    samples += self._emptied(size)
                return samples
        return None

    def _emptied(self, size: int) -> list[Sample]:
        samples, self.buckets[size] = self.buckets[size], []
        return samples

    def state(self) -> dict[str, Any]:
        return {
            "buckets": {size: as_bytes(samples) for size, samples in self.buckets.items()},
            "touched_at": dict(self.touched_at),
            "emitted": self.emitted,
            "ready": _rows_as_bytes(self.ready),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.buckets = {size: from_bytes(samples) for size, samples in state["buckets"].items()}
        self.touched_at, self.emitted = dict(state["touched_at"]), state["emitted"]
        self.ready = _rows_from_bytes(state["ready"])


def setup_packer(config: BaseDataConfig) -> Packer:
    """The packer selected by `data.pack_function`, for rows of `row_tokens`."""
    packers: dict[str, Callable[[int], Packer]] = {"cat": Cat, "best_fit": BestFit, "stack": Stack}
    return packers[config.pack_function](config.row_tokens)


class PackedRows:
    """Iterates over the rows of this process's data rank. Each row is a micro-batch."""

    def __init__(self, stream: SampleStream, config: BaseDataConfig, data_axis: DataAxis) -> None:
        self.stream = stream
        self.config = config
        self.data_axis = data_axis
        self.row_tokens = config.row_tokens
        self._packer = setup_packer(config)

    def __iter__(self) -> PackedRows:
        return self

    def __next__(self) -> PackedRow:
        samples = self.stream.with_images(self._packer(self.stream))
        return lay_out(samples, self.row_tokens, self.config.seq_len)

    def state(self) -> dict[str, Any]:
        """The position in the data after the last row, including the samples that wait for a row."""
        position = {"data_rank": self.data_axis.data_rank, "data_size": self.data_axis.data_size}
        return {**self.stream.state(), **position, "waiting": self._packer.state()}

    def cursor(self) -> dict[str, Any]:
        """Position of this data rank in the data, for people. The hash is that of the samples that wait for a row."""
        waiting = hashlib.sha256(repr(self._packer.state()).encode()).hexdigest()
        return {"entry": self.stream.position, "epoch": self.stream.epoch, "waiting_sha256": waiting[:16]}

    def load_state(self, places: Sequence[Place]) -> None:
        """Continue from this data rank's saved position, or from those of all ranks if their number has changed."""
        place = places[0]
        if len(places) > 1 or saved_data_size(place) != self.data_axis.data_size:
            place = redistribute(places, self.data_axis.data_rank, self.data_axis.data_size)
        self.stream.restore(place)
        self._packer.restore(place["waiting"])


def _rows_as_bytes(rows: Sequence[Sequence[Sample]]) -> list[list[tuple[bytes, bytes]]]:
    return [as_bytes(row) for row in rows]


def _rows_from_bytes(rows: Sequence[Sequence[tuple[bytes, bytes]]]) -> list[list[Sample]]:
    return [from_bytes(row) for row in rows]


def setup_rows(
    config: SFTDataConfig | FakeDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    embeddings: int,
    data_axis: DataAxis,
    images: Images | None = None,
) -> PackedRows:
    """Open the data and return this data rank's rows of `row_tokens`, whose tokens are among the model's `embeddings`.
    `images` reads the images of the data.

    Raises:
        DataError: the dataset is missing or has no conversations.
    """
    stream: SampleStream
    if isinstance(config, FakeDataConfig):
        stream = FakeStream(config, embeddings, data_axis)
    else:
        stream = DatasetStream(config, tokenizer, data_axis, images, embeddings)
    return PackedRows(stream, config, data_axis)


def micro_batches_per_data_rank(data: BaseDataConfig, data_axis: DataAxis) -> int:
    """Number of micro-batches of each data rank per step.

    Raises:
        DataError: the batch does not divide evenly.
    """
    if fault := batch_fault(data, data_axis.data_size):
        raise DataError(fault)
    return data.batch_size // (data_axis.data_size * data.micro_batch_size)
