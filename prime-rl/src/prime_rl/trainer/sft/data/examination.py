"""A look at the data before training: what the samples are like, and what of it should worry a person."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING

from prime_rl.configs.sft import SFTDataConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.sft.data.conversation import TokenizedSample
from prime_rl.trainer.sft.data.packer import PackedRows, setup_packer
from prime_rl.trainer.sft.data.samples import DatasetStream, Made, SampleCounts
from prime_rl.utils.logger import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prime_rl.trainer.process.world import Process

_FIRST_ROWS = 256
"""Rows that every run looks at before it starts."""
_WORRYING_TRUNCATED = 0.05
_WORRYING_UNTRAINABLE = 0.01
_WORRYING_DUPLICATES = 0.05
_WORRYING_LOSS_OF_PACKING = 0.1
_SHOWN_SAMPLES = 3


@dataclass(slots=True)
class Examination:
    """Figures of the rows that were looked at; the packed ones are those of one process."""

    row_count: int
    """Rows of an epoch; 0 when it is not known."""
    counts: SampleCounts = field(default_factory=SampleCounts)
    lengths: list[int] = field(default_factory=list)
    """Of each row that could be tokenized, before it was cut, in tokens."""
    tokens: int = 0
    targets: int = 0
    without_end: int = 0
    """Samples whose trained part has no end token."""
    duplicates: int = 0
    """Samples that have the same tokens as an earlier one."""
    packed_rows: int = 0
    fill: float = 1.0
    """Share of the packed rows that holds tokens of samples."""
    discarded: float = 0.0
    """Share of the samples' tokens that packing cuts off."""
    shown: list[TokenizedSample] = field(default_factory=list)
    """The first samples."""

    @property
    def samples(self) -> int:
        return self.counts.seen - self.counts.left_out

    def share(self, count: int) -> float:
        """Share of the rows that were looked at."""
        return count / max(self.counts.seen, 1)

    @property
    def per_epoch(self) -> float:
        """Factor from the rows that were looked at to those of an epoch."""
        return (self.row_count or self.counts.seen) / max(self.counts.seen, 1)

    @property
    def is_complete(self) -> bool:
        """Whether every row was looked at."""
        return self.counts.seen == self.row_count


def examine(rows: Iterable[Made], row_count: int, config: SFTDataConfig) -> Examination:
    """Look at `rows`, some or all of `row_count`, and pack them as a run on one process would."""
    found = Examination(row_count)
    samples: list[TokenizedSample] = []
    known: set[int] = set()
    for made in rows:
        found.counts.seen += 1
        if made.kind != "seen":
            setattr(found.counts, made.kind, getattr(found.counts, made.kind) + 1)
        if made.inputs:
            found.lengths.append(made.inputs)
        if made.sample is not None:
            samples.append(made.sample)
            found.without_end += not made.has_end
            fingerprint = hash(made.sample.token_ids.tobytes())
            found.duplicates += fingerprint in known
            known.add(fingerprint)
    found.tokens = sum(sample.inputs for sample in samples)
    found.targets = sum(sample.targets for sample in samples)
    found.shown = samples[:_SHOWN_SAMPLES]
    if samples:
        _pack(found, samples, config)
    return found


def untrainable_fault(found: Examination, config: SFTDataConfig) -> str | None:
    """Why a run should not start, if it should not."""
    counts = found.counts
    useless = counts.untrainable + counts.unmaskable
    if counts.seen == 0 or (found.samples > 0 and found.share(useless) <= config.max_untrainable_share):
        return None
    reasons = [
        f"{count} {text}"
        for count, text in (
            (counts.untrainable, f"without a trained token within data.seq_len = {config.seq_len}"),
            (counts.unmaskable, "whose messages the chat template does not let be told apart"),
            (counts.overlong, f'longer than data.seq_len = {config.seq_len} (data.overlong = "drop")'),
        )
        if count
    ]
    return (
        f"data.name = {config.name}: of {counts.seen} rows {counts.left_out} cannot be trained on "
        f"({', '.join(reasons)}); data.max_untrainable_share allows {config.max_untrainable_share:.0%}: "
        "check data.loss_mask, data.seq_len and the chat template"
    )


def worries(found: Examination, config: SFTDataConfig) -> Iterator[str]:
    """A line for each thing that is likely not meant."""
    counts, limit = found.counts, f"data.seq_len = {config.seq_len}"
    of_rows = f"of {counts.seen} rows"
    longest = max(found.lengths, default=0)
    if found.share(counts.truncated) > _WORRYING_TRUNCATED:
        yield f"{counts.truncated} {of_rows} are longer than {limit} and are cut; the longest has {longest} tokens"
    if found.share(counts.overlong) > _WORRYING_TRUNCATED:
        yield f"{counts.overlong} {of_rows} are longer than {limit} and left out; the longest has {longest} tokens"
    if found.share(counts.untrainable) > _WORRYING_UNTRAINABLE:
        yield f"{counts.untrainable} {of_rows} have no trained token within {limit} and are left out"
    if found.share(counts.unmaskable) > _WORRYING_UNTRAINABLE:
        yield f"{counts.unmaskable} {of_rows} are left out: the chat template does not let messages be told apart"
    if found.share(found.without_end) > _WORRYING_UNTRAINABLE:
        yield f"{found.without_end} {of_rows} train no end token, so a model does not learn to stop after them"
    if found.share(found.duplicates) > _WORRYING_DUPLICATES:
        yield f"{found.duplicates} {of_rows} have the same tokens as an earlier row"
    if found.discarded > _WORRYING_LOSS_OF_PACKING:
        yield (
            f'data.pack_function = "{config.pack_function}" cuts off {found.discarded:.0%} of the tokens; '
            '"best_fit" cuts none'
        )
    if 1 - found.fill > _WORRYING_LOSS_OF_PACKING and found.packed_rows > 1:
        better = "" if config.pack_function == "best_fit" else '; "best_fit" fills them better'
        padding = f"{1 - found.fill:.0%} of the rows to padding"
        yield f'data.pack_function = "{config.pack_function}" leaves {padding}{better}'


def check_first_rows(rows: PackedRows, tokenizer: PreTrainedTokenizerBase, process: Process, show: bool) -> None:
    """Look at the first rows of a run that has not begun; warn of what seems not meant, and `show` the first sample.

    Every process looks at the same rows, so all come to the same end.

    Raises:
        DataError: too many of them cannot be trained on.
    """
    stream = rows.stream
    if not isinstance(stream, DatasetStream):
        return
    found = examine(stream.first_ones(_FIRST_ROWS), stream.row_count, stream.config)
    fault = untrainable_fault(found, stream.config)
    if fault:
        raise DataError(fault)
    if not process.is_main:
        return
    for line in worries(found, stream.config):
        get_logger().warning(f"First rows of the data: {line}")
    if show:
        first = found.shown[0]
        get_logger().info(f"First sample: {tokenizer.decode(first.token_ids)!r}")
        get_logger().info(f"Trained in it: {tokenizer.decode(first.token_ids[1:][first.is_trained[1:]])!r}")


def _pack(found: Examination, samples: Sequence[TokenizedSample], config: SFTDataConfig) -> None:
    """Pack until as many samples lie in rows as there are."""
    packer, stream = setup_packer(config), _Repeated(samples)
    capacity = config.seq_len * config.micro_batch_size
    placed = held = kept = 0
    while placed < len(samples):
        row = packer(stream)
        total = sum(sample.inputs for sample in row)
        found.packed_rows += 1
        placed += len(row)
        held += total
        kept += min(total, capacity)
    found.fill = kept / (found.packed_rows * capacity)
    # What the last row lacks of the next epoch's samples is no loss.
    found.discarded = 1 - kept / held


class _Repeated:
    """A stream of given samples, over and over."""

    def __init__(self, samples: Sequence[TokenizedSample]) -> None:
        self.row_count = len(samples)
        self.position = 0
        self._samples = cycle(samples)

    @property
    def epoch(self) -> int:
        return self.position // self.row_count

    def __next__(self) -> TokenizedSample:
        self.position += 1
        return next(self._samples)
