"""Inspects the data before training: statistics of the samples, and warnings about likely mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import TYPE_CHECKING

from prime_rl.configs.data import SFTDataConfig
from prime_rl.configs.dpo import PreferenceLossConfig
from prime_rl.run.pictures import MOST_IMAGES
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.sft.data.conversation import TokenizedSample
from prime_rl.trainer.sft.data.packer import PackedRows, setup_packer
from prime_rl.trainer.sft.data.pairs import Labelled, Pair
from prime_rl.trainer.sft.data.samples import BadRows, DatasetStream, Made, Sample, SampleCounts
from prime_rl.trainer.sft.data.sources import Entries, Entry
from prime_rl.utils.logger import count_of, get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prime_rl.trainer.model.images import SampleImage
    from prime_rl.trainer.process.world import Process

_FIRST_ROWS = 256
"""Number of rows that every run inspects before it starts."""
_WORRYING_TRUNCATED = 0.05
_WORRYING_UNTRAINABLE = 0.01
_WORRYING_DUPLICATES = 0.05
_WORRYING_LENGTHS = 0.9
"""Share of pairs of which the same side is the longer one."""
_WORRYING_LOSS_OF_PACKING = 0.1
_SHOWN_SAMPLES = 3
_LOSING = ("truncated", "overlong", "untrainable")


@dataclass(slots=True)
class Examination:
    """Statistics of the inspected rows, packed as on one process."""

    row_count: int
    """Number of rows per epoch; 0 if it is unknown."""
    counts: SampleCounts = field(default_factory=SampleCounts)
    lengths: list[int] = field(default_factory=list)
    """Length in tokens of each row that could be tokenized, before it was cut; of a pair, of each answer."""
    tokens: int = 0
    targets: int = 0
    longer_chosen: int = 0
    """Number of pairs whose chosen answer is the longer one."""
    flipped: int = 0
    """Number of pairs whose scores do not favour the chosen answer."""
    without_words: int = 0
    """Number of rows with an answer of which only special tokens are trained."""
    desirable: int = 0
    """Number of answers whose label is true."""
    without_end: int = 0
    """Number of samples whose trained part has no end token."""
    unmarked_calls: int = 0
    """Number of samples with calls that the chat template does not mark as generated."""
    end_ids: set[int] = field(default_factory=set)
    """Special tokens that end the trained part of a sample."""
    duplicates: int = 0
    """Number of samples with the same tokens as an earlier one."""
    packed_rows: int = 0
    fill: float = 1.0
    """Fraction of the packed rows that is not padding."""
    discarded: float = 0.0
    """Fraction of the samples' tokens that packing cuts off."""
    faults: dict[str, None] = field(default_factory=dict)
    """What is wrong with bad rows that are skipped."""
    shown: list[TokenizedSample] = field(default_factory=list)
    """The first samples."""
    images: int = 0
    image_tokens: int = 0
    """Number of tokens that stand for images, before rows are cut."""
    first_images: list[SampleImage] = field(default_factory=list)

    pieces: int = 0
    """Number of samples beyond the first of each row that was split."""
    lost: int = 0
    """Number of tokens beyond `seq_len`, of rows that are cut or left out because of it."""

    @property
    def samples(self) -> int:
        return self.counts.seen - self.counts.left_out + self.pieces

    def share(self, count: int) -> float:
        """`count` as a fraction of the inspected rows."""
        return count / max(self.counts.seen, 1)

    @property
    def per_epoch(self) -> float:
        """Rows per epoch divided by inspected rows."""
        return (self.row_count or self.counts.seen) / max(self.counts.seen, 1)

    @property
    def is_complete(self) -> bool:
        """Whether every row was inspected."""
        return self.counts.seen == self.row_count


def examine(rows: Iterable[Made], row_count: int, config: SFTDataConfig) -> Examination:
    """Inspect `rows`, some or all of `row_count`, and pack them as one process would."""
    found = Examination(row_count)
    samples: list[Sample] = []
    known: set[int] = set()
    for made in rows:
        found.counts.seen += 1
        if made.kind != "seen":
            setattr(found.counts, made.kind, getattr(found.counts, made.kind) + 1)
        if made.fault:
            found.faults[made.fault] = None
        if made.inputs:
            found.lengths += made.lengths
        kept = sum(sample.inputs for sample in made.samples)
        found.lost += max(0, made.inputs - kept) if made.kind in _LOSING else 0
        if made.sample is not None:
            samples += map(_without_images, made.samples)
            found.pieces += len(made.more)
            found.without_end += not made.has_end
            found.flipped += made.is_flipped
            found.without_words += made.says_nothing
            found.unmarked_calls += made.sample.unmarked_calls
            images = [image for each in made.samples for sequence in each.sequences for image in sequence.images]
            found.images += len(images)
            found.image_tokens += sum(image.tokens for image in images)
            found.first_images += images[: MOST_IMAGES - len(found.first_images)]
            if isinstance(made.sample, Pair):
                found.longer_chosen += made.sample.chosen.targets > made.sample.rejected.targets
            found.desirable += sum(isinstance(each, Labelled) and each.is_desirable for each in made.samples)
            if made.end_id is not None:
                found.end_ids.add(made.end_id)
            fingerprint = hash(tuple((each.token_ids.tobytes(), each.images) for each in made.sample.sequences))
            found.duplicates += fingerprint in known
            known.add(fingerprint)
    found.tokens = sum(sample.inputs for sample in samples)
    found.targets = sum(sample.targets for sample in samples)
    found.shown = [each for sample in samples[:_SHOWN_SAMPLES] for each in sample.sequences]
    if samples:
        _pack(found, samples, config)
    return found


def _without_images(sample: Sample) -> Sample:
    """Only tokens are packed here, and bytes of all images would fill the memory."""
    return replace(sample, images=()) if isinstance(sample, TokenizedSample) and sample.images else sample


def steps_per_epoch(found: Examination, config: SFTDataConfig) -> float:
    """Number of optimizer steps that one pass over the data takes."""
    return found.packed_rows * found.per_epoch * config.micro_batch_size / config.batch_size


def steps_of(num_epochs: float, steps_per_epoch: float) -> int:
    """Number of whole steps that cover `num_epochs` passes over the data."""
    return max(1, math.ceil(num_epochs * steps_per_epoch - 1e-9))


def made_rows(entries: Entries, make: Callable[[Entry], Made], max_rows: int, max_tokens: int) -> Iterator[Made]:
    """The first rows of the first epoch, until there are enough of them or of their tokens."""
    tokens = 0
    for position in range(min(max_rows, entries.row_count or max_rows)):
        entry = entries.at(position)
        if entries.epoch_of(position) > 0 or tokens > max_tokens:
            return
        made = make(entry)
        tokens += made.inputs
        yield made


def packed_whole(config: SFTDataConfig) -> SFTDataConfig:
    """The config of validation data with the packing that validation uses, whatever `pack_function` it has."""
    return config.model_copy(update={"pack_function": "best_fit"})


def untrainable_fault(found: Examination, config: SFTDataConfig) -> str | None:
    """Why a run must not start; None if it may."""
    counts, section = found.counts, config.section
    limit = f"{section}.seq_len = {config.seq_len}"
    useless = counts.untrainable + counts.unmaskable + counts.bad
    if counts.seen == 0 or (found.samples > 0 and found.share(useless) <= config.max_untrainable_share):
        return None
    reasons = [
        f"{count} {text}"
        for count, text in (
            (counts.untrainable, f"without a trained token within {limit}"),
            (counts.unmaskable, "whose messages cannot be found in the chat template's text"),
            (counts.bad, f'without a conversation or an answer ({section}.on_bad_row = "skip")'),
            (counts.overlong, f'longer than {limit} ({section}.overlong = "drop")'),
        )
        if count
    ]
    return (
        f"{config.label}: of {counts.seen} rows {counts.left_out} cannot be trained on "
        f"({', '.join(reasons)}); {section}.max_untrainable_share allows {config.max_untrainable_share:.0%}: "
        f"check {section}.loss_mask, {section}.seq_len and the chat template"
    )


def worries(found: Examination, config: SFTDataConfig) -> Iterator[str]:
    """One line for each likely mistake."""
    counts, limit = found.counts, f"{config.section}.seq_len = {config.seq_len}"
    of_rows = f"of {counts.seen} rows"
    longest = max(found.lengths, default=0)
    if found.share(counts.truncated) > _WORRYING_TRUNCATED:
        lost = f"{found.lost / sum(found.lengths):.0%} of all tokens are lost"
        split = f'; {config.section}.overlong = "split" trains them' if found.lost > found.tokens else ""
        yield (
            f"{counts.truncated} {of_rows} are longer than {limit} and are cut; the longest has {longest} tokens, and "
            f"{lost}{split}"
        )
    if found.share(counts.overlong) > _WORRYING_TRUNCATED:
        yield f"{counts.overlong} {of_rows} are longer than {limit} and skipped; the longest has {longest} tokens"
    if found.share(counts.untrainable) > _WORRYING_UNTRAINABLE:
        yield f"{counts.untrainable} {of_rows} have no trained token within {limit} and are skipped"
    if found.share(counts.unmaskable) > _WORRYING_UNTRAINABLE:
        yield f"{counts.unmaskable} {of_rows} are skipped: the chat template does not show where messages start and end"
    if counts.bad:
        first = next(iter(found.faults))
        kinds = "" if len(found.faults) == 1 else f", and {len(found.faults) - 1} other reasons"
        yield f'{counts.bad} {of_rows} are skipped ({config.section}.on_bad_row = "skip"): {first}{kinds}'
    if found.share(found.without_end) > _WORRYING_UNTRAINABLE:
        yield f"{found.without_end} {of_rows} have no end token that is trained on, so the model does not learn to stop"
    if found.unmarked_calls:
        yield (
            f"{found.unmarked_calls} {of_rows} have tool calls outside of the chat template's {{% generation %}}, "
            "which are not trained: move {% endgeneration %} behind them, or take the marks out of the template"
        )
    longer = found.longer_chosen / max(found.samples, 1)
    if config.holds_pairs and not 1 - _WORRYING_LENGTHS <= longer <= _WORRYING_LENGTHS:
        word = "longer" if longer > 0.5 else "shorter or equal"
        yield (
            f"the chosen answer is {word} in {max(longer, 1 - longer):.0%} of {found.samples} pairs: the model may "
            "learn the length"
        )
    if found.flipped:
        yield f"{found.flipped} {of_rows} have a score_chosen that is not above score_rejected: turn or remove them"
    if found.without_words:
        yield (
            f"{found.without_words} {of_rows} have an answer of which only special tokens, such as the end of a "
            f"message, are trained: it is empty, or {limit} cuts it"
        )
    if found.share(found.duplicates) > _WORRYING_DUPLICATES:
        yield f"{found.duplicates} {of_rows} have the same tokens as an earlier row"
    if found.discarded > _WORRYING_LOSS_OF_PACKING:
        yield (
            f'{config.section}.pack_function = "{config.pack_function}" cuts off {found.discarded:.0%} of the tokens; '
            '"best_fit" cuts none'
        )
    if 1 - found.fill > _WORRYING_LOSS_OF_PACKING and found.packed_rows > 1:
        better = "" if config.pack_function == "best_fit" else '; "best_fit" fills them better'
        padding = f"{1 - found.fill:.0%} of the rows to padding"
        yield f'{config.section}.pack_function = "{config.pack_function}" leaves {padding}{better}'


def image_worries(found: Examination, config: SFTDataConfig) -> Iterator[str]:
    """One line if the data of a run with `[model.vision]` has no image."""
    if found.samples and not found.images:
        names = f"{config.section}.columns.images names their column"
        yield f"[model.vision] is set, and no row has an image: {names}. Without one, tower_lr trains nothing"


def label_worries(found: Examination, loss: PreferenceLossConfig) -> Iterator[str]:
    """One line if the weights of good and bad answers do not fit their numbers.

    KTO's paper (section 4.2) wants desirable_weight * good / (undesirable_weight * bad) within 1 and 4/3.
    """
    good, bad = found.desirable, found.samples - found.desirable
    if good == 0 or bad == 0:
        kind, other = ("bad", "prefer") if good == 0 else ("good", "avoid")
        yield f"all {found.samples} answers are {kind}: no answer shows what the model should {other}"
        return
    product = loss.desirable_weight * good, loss.undesirable_weight * bad
    if 0 in product:
        return  # one kind of answer is left out on purpose
    if not 0.99 <= product[0] / product[1] <= 4 / 3 + 0.01:
        desirable, undesirable = product[1] / good, product[0] / bad
        yield (
            f"{good} answers are good and {bad} bad, which with loss.desirable_weight = {loss.desirable_weight:g} and "
            f"loss.undesirable_weight = {loss.undesirable_weight:g} does not balance: set desirable_weight to "
            f"{desirable:.2f} up to {desirable * 4 / 3:.2f}, or undesirable_weight to {undesirable * 3 / 4:.2f} up to "
            f"{undesirable:.2f}"
        )


def repeats(found: Examination, config: SFTDataConfig) -> Iterator[str]:
    """One line if a step reads the training data more than once."""
    if not found.row_count or not found.packed_rows or (steps := steps_per_epoch(found, config)) >= 1:
        return
    times = f"{1 / steps:,.0f}" if steps < 0.1 else f"{1 / steps:.1f}"
    rows = count_of("row", found.row_count)
    yield f"a batch of {count_of('row', config.batch_size)} reads the {rows} of this data {times} times"


def check_first_rows(
    rows: PackedRows,
    tokenizer: PreTrainedTokenizerBase,
    process: Process,
    show: bool,
    loss: PreferenceLossConfig | None = None,
) -> Examination:
    """Inspect the first rows before training: warn about likely mistakes, and log the first sample if `show` is set.

    Every process inspects the same rows and comes to the same result. Generated samples are not inspected.

    Raises:
        DataError: too many of the rows cannot be trained on.
    """
    stream = rows.stream
    if not isinstance(stream, DatasetStream):
        return Examination(0)
    faults = BadRows()
    found = examine(stream.first_ones(_FIRST_ROWS, faults), stream.row_count, stream.config)
    faults.refuse(stream.config.section)
    fault = untrainable_fault(found, stream.config)
    if fault:
        raise DataError(fault)
    if not process.is_main:
        return found
    of_labels = label_worries(found, loss) if loss is not None and loss.is_unpaired else ()
    for line in (*worries(found, stream.config), *of_labels, *repeats(found, stream.config)):
        get_logger().warning(f"First rows of the data: {line}")
    if show:
        first = found.shown[0]
        get_logger().info(f"First sample: {tokenizer.decode(first.token_ids)!r}")
        get_logger().info(f"Trained in it: {tokenizer.decode(first.token_ids[1:][first.is_trained[1:]])!r}")
    return found


def _pack(found: Examination, samples: Sequence[Sample], config: SFTDataConfig) -> None:
    """Pack rows until they hold as many samples as there are."""
    packer, stream = setup_packer(config), _Repeated(samples)
    capacity = config.row_tokens
    placed = held = kept = 0
    while placed < len(samples):
        row = packer(stream)
        total = sum(sample.inputs for sample in row)
        found.packed_rows += 1
        placed += len(row)
        held += total
        kept += min(total, capacity)
    found.fill = kept / (found.packed_rows * capacity)
    # Tokens of the next epoch that the last row cuts off are not a loss.
    found.discarded = 1 - kept / held


class _Repeated:
    """A stream that repeats the given samples."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.row_count = len(samples)
        self.position = 0
        self._samples = cycle(samples)

    @property
    def epoch(self) -> int:
        return self.position // self.row_count

    def __next__(self) -> Sample:
        self.position += 1
        return next(self._samples)
