"""The endless stream of training samples, divided over the data ranks, without those that cannot be trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from prime_rl.configs.sft import FakeDataConfig, SFTDataConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.sft.data.chat_spans import UnmaskableSample
from prime_rl.trainer.sft.data.conversation import ConversationTokenizer, TokenizedSample
from prime_rl.trainer.sft.data.entries import Entry, setup_entries
from prime_rl.trainer.sft.data.places import Place, Places
from prime_rl.utils.logger import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prime_rl.trainer.process.data_axis import DataAxis

_CACHED_TOKENS = 2**26
"""Tokens that stay tokenized from one epoch to the next: about 340 MB a process."""
_MAX_BARREN_RUN = 100_000
"""Rows without a use, one behind the other, after which a stream of unknown length is given up."""


@dataclass(slots=True)
class SampleCounts:
    """What became of the rows that this process looked at, each counted in every epoch."""

    seen: int = 0
    truncated: int = 0
    overlong: int = 0
    """Left out because they are too long."""
    untrainable: int = 0
    """Left out because no token within `seq_len` is trained."""
    unmaskable: int = 0
    """Left out because the chat template does not let their messages be told apart."""

    @property
    def left_out(self) -> int:
        return self.overlong + self.untrainable + self.unmaskable


class SampleSource(Protocol):
    """Samples without end, as packers see them."""

    @property
    def position(self) -> int:
        """Index of the next entry that this data rank reads."""

    @property
    def epoch(self) -> int: ...

    def __next__(self) -> TokenizedSample: ...


class SampleStream(SampleSource, Protocol):
    """Samples of a dataset. Data ranks divide its entries, see `places`."""

    counts: SampleCounts
    drawn: list[str]
    """Names of the entries that were looked at since somebody cleared this list."""

    @property
    def row_count(self) -> int:
        """Rows of one epoch; 0 where that is unknown, and for made-up data, which has none."""

    def state(self) -> dict[str, Any]:
        """The place behind the sample returned last."""

    def restore(self, state: Place) -> None:
        """Continue at the place that `state` returned."""


@dataclass(frozen=True, slots=True)
class Made:
    """What became of a row."""

    sample: TokenizedSample | None
    """None when it cannot be trained on."""
    kind: str
    """The count in `SampleCounts` that it belongs to: `seen` for nothing special."""
    inputs: int = 0
    """Its length before it was cut."""
    has_end: bool = True
    """Whether the last trained token, before the cut, is one that ends a message."""


class SampleMaker:
    """Makes a row a sample of at most `seq_len` inputs, or says why it is none."""

    def __init__(self, config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self._tokenize = ConversationTokenizer(tokenizer, config.loss_mask)
        self._special_ids = frozenset(tokenizer.all_special_ids)

    def __call__(self, entry: Entry) -> Made:
        """Tokenize a row, mask and cut it.

        Raises:
            DataError: the row is no conversation, or is too long and `data.overlong` is "error".
        """
        row = entry.read()
        try:
            sample = self._tokenize(row)
        except UnmaskableSample:
            return Made(None, "unmaskable")
        except DataError as error:
            raise DataError(f"{entry.where}: {error}") from error
        is_overlong = sample.inputs > self.config.seq_len
        if is_overlong and self.config.overlong == "error":
            raise DataError(
                f"{entry.where}: {sample.inputs} tokens, more than data.seq_len = {self.config.seq_len}, "
                'and data.overlong = "error"'
            )
        if is_overlong and self.config.overlong == "drop":
            return Made(None, "overlong", sample.inputs)
        cut = sample.first(self.config.seq_len)
        if cut.targets == 0:
            return Made(None, "untrainable", sample.inputs)
        last_trained = sample.token_ids[np.flatnonzero(sample.is_trained)[-1]]
        kind = "truncated" if is_overlong else "seen"
        return Made(cut, kind, sample.inputs, has_end=int(last_trained) in self._special_ids)


class DatasetStream:
    """The rows of a dataset, epoch after epoch. Rows without a use are left out, and counted."""

    def __init__(self, config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, data_axis: DataAxis) -> None:
        self.config = config
        self.data_axis = data_axis
        self.entries = setup_entries(config)
        self.counts = SampleCounts()
        self.drawn: list[str] = []
        self._places = Places(data_axis)
        self._make = SampleMaker(config, tokenizer)
        self._cache: dict[int, Made] = {}
        self._cached_tokens = 0
        self._told: set[int] = set()

    @property
    def row_count(self) -> int:
        return self.entries.row_count

    @property
    def position(self) -> int:
        return self._places.next

    @property
    def epoch(self) -> int:
        return self.entries.epoch_of(self.position)

    def __next__(self) -> TokenizedSample:
        barren = 0
        while True:
            sample = self._sample(self.entries.at(self._places.next))
            self._places.take()
            if sample is not None:
                return sample
            barren += 1
            # Twice through this data rank's share without a usable row: there is none.
            if barren > (2 * self.row_count // self.data_axis.data_size + 1 if self.row_count else _MAX_BARREN_RUN):
                raise DataError(
                    f"data.name = {self.config.name}: no row has a trained token within data.seq_len = "
                    f"{self.config.seq_len}; check data.loss_mask, data.overlong and data.seq_len"
                )

    def state(self) -> dict[str, Any]:
        return {**self._places.state(), **self.entries.state(), "counts": asdict(self.counts)}

    def restore(self, state: Place) -> None:
        self._places.restore(state)
        self.entries.restore(state)
        self.counts = SampleCounts(**state["counts"])

    def first_ones(self, count: int) -> Iterator[Made]:
        """What the stream begins with, over all data ranks. Moves and counts nothing.

        Only before the first sample has been taken. Ends with the first epoch, as far as its length is known.
        """
        for position in range(min(count, self.row_count or self.config.shuffle_buffer)):
            entry = self.entries.at(position)
            if self.entries.epoch_of(position) > 0:
                return
            yield self._made(entry)

    def _sample(self, entry: Entry) -> TokenizedSample | None:
        """The tokens of a row, or None if it cannot be trained on."""
        made = self._made(entry)
        self.drawn.append(entry.where)
        self.counts.seen += 1
        if made.kind != "seen":
            setattr(self.counts, made.kind, getattr(self.counts, made.kind) + 1)
            self._tell(entry, made.kind)
        return made.sample

    def _tell(self, entry: Entry, kind: str) -> None:
        """Warn of the first row of a kind, and each time that their number has doubled; of a row only once."""
        if entry.key in self._told:
            return
        if entry.key is not None:
            self._told.add(entry.key)
        count = getattr(self.counts, kind)
        if count & (count - 1) == 0:
            line = _TOLD[kind].format(where=entry.where, limit=self.config.seq_len)
            get_logger().warning(f"{line} (rows like it so far: {count})")

    def _made(self, entry: Entry) -> Made:
        if entry.key is not None and entry.key in self._cache:
            return self._cache[entry.key]
        made = self._make(entry)
        size = 0 if made.sample is None else len(made.sample)
        if entry.key is not None and self._cached_tokens + size <= _CACHED_TOKENS:
            self._cache[entry.key] = made
            self._cached_tokens += size
        return made


_TOLD = {
    "truncated": "Cut {where}: longer than data.seq_len = {limit}",
    "overlong": "Left out {where}: longer than data.seq_len = {limit}",
    "untrainable": "Left out {where}: no trained token within data.seq_len = {limit}",
    "unmaskable": "Left out {where}: the chat template does not let its messages be told apart",
}


class FakeStream:
    """Made-up samples, all tokens trained: `increasing` repeats the stream's index, `random` draws tokens."""

    epoch = 0
    row_count = 0

    def __init__(self, config: FakeDataConfig, vocab_size: int, data_axis: DataAxis) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.counts = SampleCounts()
        self.drawn: list[str] = []
        self._places = Places(data_axis)

    @property
    def position(self) -> int:
        return self._places.next

    def __next__(self) -> TokenizedSample:
        position = self._places.take()
        generator = np.random.default_rng(position)
        longest = self.config.seq_len
        length = longest if self.config.length == "fixed" else int(generator.integers(1, max(longest, 2)))
        if self.config.input_ids == "increasing":
            token_ids = np.full(length + 1, position % self.vocab_size)
        else:
            token_ids = generator.integers(0, self.vocab_size, size=length + 1)
        self.counts.seen += 1
        self.drawn.append(f"entry {position}")
        return TokenizedSample(token_ids.astype(np.int32), np.ones(length + 1, dtype=bool))

    def state(self) -> dict[str, Any]:
        return {**self._places.state(), "counts": asdict(self.counts)}

    def restore(self, state: Place) -> None:
        self._places.restore(state)
        self.counts = SampleCounts(**state["counts"])
