"""The stream of training samples: endless, shuffled anew each epoch, divided over the processes, resumable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from prime_rl.configs.sft import FakeDataConfig, SFTDataConfig
from prime_rl.trainer.errors import DataError
from prime_rl.trainer.sft.chat_spans import UnmaskableSample
from prime_rl.trainer.sft.conversation import ConversationTokenizer, TokenizedSample
from prime_rl.trainer.sft.messages import check_columns
from prime_rl.trainer.sft.sources import load_rows
from prime_rl.trainer.world import World
from prime_rl.utils.logger import get_logger

_CACHED_TOKENS = 2**26
"""Tokens that stay tokenized from one epoch to the next: about 340 MB a process."""


class SampleStream(Protocol):
    """Samples without end; entry i of the stream belongs to process i modulo the number of processes."""

    position: int
    """Index of the next entry in the stream that this process looks at; all that resuming needs."""
    row_count: int
    """Rows of one epoch; 0 for made-up data, which has none."""

    @property
    def epoch(self) -> int: ...

    def __next__(self) -> TokenizedSample: ...


class ConversationStream:
    """The rows of a dataset, epoch after epoch. Rows without a use are left out, and counted."""

    def __init__(self, config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, world: World) -> None:
        self.config = config
        self.world = world
        self.rows = load_rows(config)
        check_columns(config.name, self.rows[0])
        self.row_count = len(self.rows)
        self.position = world.rank
        self.skipped = 0
        self._tokenize = ConversationTokenizer(tokenizer, config.loss_mask)
        self._cache: dict[int, TokenizedSample | None] = {}
        self._cached_tokens = 0
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def epoch(self) -> int:
        return self.position // self.row_count

    def __next__(self) -> TokenizedSample:
        # Twice through this process's share without a usable row: there is none.
        for _ in range(2 * self.row_count // self.world.world_size + 2):
            index = self._row_index(self.position)
            self.position += self.world.world_size
            sample = self._sample(index)
            if sample is not None:
                return sample
        raise DataError(
            f"data.name = {self.config.name}: no row has a trained token within data.seq_len = {self.config.seq_len}; "
            "check data.loss_mask and data.seq_len"
        )

    def _row_index(self, position: int) -> int:
        epoch, offset = divmod(position, self.row_count)
        if not self.config.shuffle:
            return offset
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng(self.config.seed + epoch)
            self._order = epoch, generator.permutation(self.row_count)
        return int(self._order[1][offset])

    def _sample(self, index: int) -> TokenizedSample | None:
        """The tokens of row `index`, or None if it cannot be trained on."""
        if index in self._cache:
            return self._cache[index]
        try:
            sample = self._tokenize(self.rows[index])
        except DataError as error:
            raise DataError(f"data.name = {self.config.name}, row {index}: {error}") from error
        except UnmaskableSample:
            self._skip(index, "the chat template renders its start differently once more messages follow")
            sample = None
        # The first token is never predicted.
        if sample is not None and not sample.is_trained[1 : self.config.seq_len + 1].any():
            self._skip(index, f"no trained token within data.seq_len = {self.config.seq_len}")
            sample = None
        size = 0 if sample is None else len(sample.token_ids)
        if self._cached_tokens + size <= _CACHED_TOKENS:
            self._cache[index] = sample
            self._cached_tokens += size
        return sample

    def _skip(self, index: int, reason: str) -> None:
        self.skipped += 1
        # Powers of two: the first is told at once, a thousand take ten lines.
        if self.skipped & (self.skipped - 1) == 0:
            get_logger().warning(f"Left out row {index}: {reason} (rows left out so far: {self.skipped})")


class FakeStream:
    """Made-up samples, all tokens trained: `increasing` repeats the stream's index, `random` draws tokens."""

    epoch = 0
    row_count = 0

    def __init__(self, config: FakeDataConfig, vocab_size: int, world: World) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.world = world
        self.position = world.rank

    def __next__(self) -> TokenizedSample:
        generator = np.random.default_rng(self.position)
        longest = self.config.seq_len
        length = longest if self.config.length == "fixed" else int(generator.integers(1, max(longest, 2)))
        if self.config.input_ids == "increasing":
            token_ids = np.full(length + 1, self.position % self.vocab_size)
        else:
            token_ids = generator.integers(0, self.vocab_size, size=length + 1)
        self.position += self.world.world_size
        return TokenizedSample(token_ids.astype(np.int32), np.ones(length + 1, dtype=bool))


@dataclass(frozen=True, slots=True)
class PackedRow:
    """T tokens of several samples, each with its target; arrays of [T]."""

    input_ids: np.ndarray
    target_ids: np.ndarray
    """The token that follows in the same sample."""
    is_trained: np.ndarray
    """Whether the target counts in the loss."""
    position_ids: np.ndarray
    """Restart at 0 with each sample."""
    samples: int
    """Samples that the row holds, the last perhaps in part."""


class PackedRows:
    """Rows of exactly `row_tokens` tokens: samples one behind the other, the last one cut, its rest discarded."""

    def __init__(self, stream: SampleStream, row_tokens: int, world: World) -> None:
        self.stream = stream
        self.row_tokens = row_tokens
        self.world = world

    def __iter__(self) -> Iterator[PackedRow]:
        return self

    def __next__(self) -> PackedRow:
        samples, total = [], 0
        while total < self.row_tokens:
            sample = next(self.stream)
            samples.append(sample)
            total += len(sample.token_ids) - 1
        inputs = [sample.token_ids[:-1] for sample in samples]
        return PackedRow(
            input_ids=self._joined(inputs).astype(np.int64),
            target_ids=self._joined([sample.token_ids[1:] for sample in samples]).astype(np.int64),
            is_trained=self._joined([sample.is_trained[1:] for sample in samples]),
            position_ids=self._joined([np.arange(len(part)) for part in inputs]),
            samples=len(samples),
        )

    def _joined(self, parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts)[: self.row_tokens]

    def state(self) -> dict[str, Any]:
        """The place in the data behind the row returned last."""
        return {"position": self.stream.position, "row_count": self.stream.row_count}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue at a place that `state` returned; an empty mapping leaves the place as it is.

        A place that another number of processes saved becomes this process's next entry behind it.
        """
        if not state:
            return
        if state["row_count"] != self.stream.row_count and self.world.is_main:
            get_logger().warning(
                f"the dataset has {self.stream.row_count} rows, and had {state['row_count']} when the checkpoint was "
                "saved: the samples that follow are not those of an uninterrupted run"
            )
        position, processes = state["position"], self.world.world_size
        self.stream.position = position + (self.world.rank - position) % processes


def setup_rows(
    config: SFTDataConfig | FakeDataConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int, world: World
) -> PackedRows:
    """This process's rows of `seq_len * micro_batch_size` tokens.

    Raises:
        DataError: the dataset is missing or has no conversations.
    """
    stream: SampleStream
    if isinstance(config, FakeDataConfig):
        stream = FakeStream(config, vocab_size, world)
    else:
        stream = ConversationStream(config, tokenizer, world)
    return PackedRows(stream, config.seq_len * config.micro_batch_size, world)
