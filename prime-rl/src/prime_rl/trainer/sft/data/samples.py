"""Endless stream of training samples, divided among the data ranks. Rows that cannot be trained on are skipped."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from prime_rl.checks.time_limit import MAX_RENDER_S, OutOfTime, time_limit
from prime_rl.configs.data import FakeDataConfig, SFTDataConfig, length_fault
from prime_rl.run.process import own_beats
from prime_rl.trainer.model.images import RowImage, SampleImage
from prime_rl.trainer.process.errors import BadRow, DataError
from prime_rl.trainer.sft.data.conversation import (
    ConversationTokenizer,
    TokenizedSample,
    UnmaskableSample,
    padding_id,
    special_ids,
)
from prime_rl.trainer.sft.data.pairs import (
    Labelled,
    Pair,
    have_equal_prompts,
    labelled_of,
    margin_of,
    scores_are_flipped,
    sides_of,
    with_answer_of,
)
from prime_rl.trainer.sft.data.places import Place, Places
from prime_rl.trainer.sft.data.sources import Entry, setup_entries
from prime_rl.utils.conversations import PlainText, Row, RowFault, read_row, split_images
from prime_rl.utils.images import ImageFault, located
from prime_rl.utils.logger import count_of, get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prime_rl.trainer.model.images import Images
    from prime_rl.trainer.process.mesh import DataAxis

Sample = TokenizedSample | Pair | Labelled
"""What packing keeps together: one sequence, or two that are compared."""
_CACHED_TOKENS = 2**26
"""Number of tokens kept from one epoch to the next, about 340 MB per process."""
_TOKENS_PER_ROW = 100
"""A kept row takes as much memory as these, besides its tokens. Ten million short rows would take gigabytes."""
_MAX_SKIPPED_IN_A_ROW = 100_000
"""A stream of unknown length fails after this many unusable rows in a row."""


@dataclass(slots=True)
class SampleCounts:
    """Counts of the rows that this process has read. A row counts again in every epoch."""

    seen: int = 0
    truncated: int = 0
    split: int = 0
    """Made into several samples, because they are longer than `seq_len`."""
    overlong: int = 0
    """Skipped: longer than `seq_len`."""
    untrainable: int = 0
    """Skipped: no trained token within `seq_len`."""
    unmaskable: int = 0
    """Skipped: the chat template does not show where their messages start and end."""
    bad: int = 0
    """Skipped: no conversation, or one without an answer (`data.on_bad_row = "skip"`)."""

    @property
    def left_out(self) -> int:
        return self.overlong + self.untrainable + self.unmaskable + self.bad


class SampleSource(Protocol):
    """An endless stream of samples, as packers see it."""

    @property
    def position(self) -> int:
        """Index of the next entry that this data rank reads."""

    @property
    def epoch(self) -> int: ...

    def __next__(self) -> Sample: ...


class SampleStream(SampleSource, Protocol):
    """The samples of one data rank. `places` says which rank reads which entries."""

    counts: SampleCounts
    drawn: list[str]
    """Names of the entries read since the caller last cleared this list."""

    @property
    def row_count(self) -> int:
        """Number of rows per epoch; 0 if it is unknown, or if the data is generated."""

    def state(self) -> dict[str, Any]:
        """The position after the last sample."""

    def restore(self, state: Place) -> None:
        """Continue at a position that `state` returned."""

    def with_images(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """Samples with their images, which those that wait only refer to."""


@dataclass(frozen=True, slots=True)
class Made:
    """The sample made from a row, if it can be trained on."""

    sample: Sample | None
    """None if the row is skipped."""
    kind: str
    """Name of the count in `SampleCounts` that it belongs to; `seen` for an ordinary row."""
    inputs: int = 0
    """Length before it was cut."""
    has_end: bool = True
    """Whether the last trained token, before the cut, is a special token such as the end of a message."""
    end_id: int | None = None
    """The token that ends the text, if it is a special one."""
    fault: str = ""
    """What is wrong with a bad row."""
    more: tuple[Sample, ...] = ()
    """Further samples: of a row that was split, or the rejected answer of a pair that is read as two answers."""
    is_flipped: bool = False
    """Whether the scores of a pair say that the rejected answer is as good as the chosen one, or better."""
    says_nothing: bool = False
    """Whether all that is trained of an answer are special tokens."""
    of_sides: tuple[int, ...] = ()
    """Length of each sequence of a row, before it was cut."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each sequence that `seq_len` limits, before it was cut."""
        return self.of_sides or (self.inputs,)

    @property
    def samples(self) -> tuple[Sample, ...]:
        return () if self.sample is None else (self.sample, *self.more)


class SampleMaker:
    """Turns a row into a sample of at most `seq_len` inputs, or says why it cannot."""

    def __init__(
        self,
        config: SFTDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        max_row_s: float = MAX_RENDER_S,
        images: Images | None = None,
        embeddings: int | None = None,
    ) -> None:
        """`embeddings`: ids from here on are not in the model, and rows with one are bad. None checks none."""
        if (fault := length_fault(config, config.section)) is not None:
            raise DataError(fault)
        self.config = config
        self.max_row_s = max_row_s
        self._tokenize = ConversationTokenizer(
            tokenizer,
            config.loss_mask,
            config.ignored_keys,
            None if config.overlong == "split" else config.seq_len,
            config.section,
            config.template_date,
            images,
        )
        self._tokenizer = tokenizer
        self._embeddings = embeddings
        self._image_id = None if images is None else images.reader.token_id
        self._special_ids = frozenset(special_ids(tokenizer))
        self._are_scored = config.holds == "scored pairs"
        self._padding_id = padding_id(tokenizer) if self._are_scored else None
        # A row holds all tokens of a scored sequence, and of others all but the last, which is a target alone.
        self._most_inputs = config.seq_len - self._are_scored

    def __call__(self, entry: Entry) -> Made:
        """Tokenize, mask and cut a row.

        Raises:
            DataError: the row is not a conversation, or it is too long and `data.overlong` is "error".
        """
        own_beats().tick()
        row = entry.read()
        try:
            with time_limit(self.max_row_s):
                sequences, margin = self._sequences(row), self._margin(row)
        except UnmaskableSample:
            return Made(None, "unmaskable")
        except (BadRow, RecursionError) as error:
            fault = str(error) if isinstance(error, BadRow) else "lists or objects are nested too deeply"
            if self.config.on_bad_row == "skip":
                return Made(None, "bad", fault=fault)
            raise BadRow(f"{entry.where}: {fault}") from error
        except DataError as error:
            raise DataError(f"{entry.where}: {error}") from error
        except OutOfTime:
            raise DataError(
                f"{entry.where}: tokenizing takes more than {self.max_row_s:g} s: shorten or remove the row, or look "
                "for a loop in the chat template"
            ) from None
        longest = max(sequences, key=lambda each: each.inputs)
        is_overlong = longest.inputs > self._most_inputs
        if is_overlong and self.config.overlong == "error":
            tokens = longest.inputs + self._are_scored
            count = f"at least {tokens}" if longest.is_cut else tokens
            raise DataError(
                f"{entry.where}: {count} tokens, more than {self.config.section}.seq_len = {self.config.seq_len}, "
                f'and {self.config.section}.overlong = "error"'
            )
        of_sides = tuple((each.whole_inputs or each.inputs) + self._are_scored for each in sequences)
        inputs = sum(of_sides)
        if is_overlong and self.config.overlong == "drop":
            return Made(None, "overlong", inputs, of_sides=of_sides)
        if is_overlong and self.config.overlong == "split":
            return self._split(longest)
        cut = [each.first(self._most_inputs) for each in sequences]
        if not all(each.targets for each in cut):
            return Made(None, "untrainable", inputs, of_sides=of_sides)
        ends = [self._end_id(each) for each in sequences]
        has_end = all(each.is_cut or end is not None for each, end in zip(sequences, ends, strict=True))
        if len(cut) == 2 and np.array_equal(cut[0].token_ids, cut[1].token_ids):
            return self._equal_pair(entry, is_cut=is_overlong)
        key = -1 if entry.key is None else entry.key
        samples: Sequence[Sample] = cut
        if self.config.holds_pairs:
            samples = [Pair(cut[0], cut[1], key, margin, self._padding_id)]
        elif self.config.holds != "samples":
            labels = [label for _, label in labelled_of(row)]
            samples = [
                Labelled(sequence, label, 2 * key + side, self._mismatched(entry, sequence, side))
                for side, (sequence, label) in enumerate(zip(cut, labels, strict=True))
            ]
        return Made(
            samples[0],
            "truncated" if is_overlong else "seen",
            inputs,
            has_end,
            ends[0],
            more=tuple(samples[1:]),
            is_flipped=len(cut) == 2 and scores_are_flipped(row),
            says_nothing=any(self._special_ids.issuperset(each.token_ids[each.is_trained].tolist()) for each in cut),
            of_sides=of_sides,
        )

    def _sequences(self, row: Row) -> tuple[TokenizedSample, ...]:
        """The sequences that a row makes: one, or in preferences one for each answer."""
        if self.config.holds == "samples":
            return (self._checked(self._tokenize(row)),)
        try:
            sides = sides_of(row) if self.config.holds_pairs else [side for side, _ in labelled_of(row)]
        except RowFault as fault:
            raise BadRow(str(fault)) from fault
        return tuple(self._checked(self._tokenize(side)) for side in sides)

    def _checked(self, sample: TokenizedSample) -> TokenizedSample:
        """The sample, if the model has an embedding for each of its tokens; those of images need none."""
        if self._embeddings is not None:
            beyond = sample.token_ids[sample.token_ids >= self._embeddings].tolist()
            if unknown := next((each for each in beyond if each != self._image_id), None):
                token = self._tokenizer.convert_ids_to_tokens(unknown)
                raise BadRow(
                    f"a text holds {token}, for which the model has no embedding: remove it, or list it in "
                    "tokenizer.add_tokens of SFT"
                )
        return sample

    def _mismatched(self, entry: Entry, sequence: TokenizedSample, side: int) -> TokenizedSample | None:
        """A row's prompt with the answer of another row, if the loss needs it: the row before it, unless that has the
        same prompt, as several answers to one question have."""
        if self.config.holds != "mismatched labels":
            return None
        other = None
        for row in entry.others():
            try:
                with time_limit(self.max_row_s):
                    others = self._sequences(row)
            except (DataError, UnmaskableSample, RecursionError, OutOfTime):
                continue  # told where the row itself is read
            if not all(each.targets for each in others):
                continue
            other = others[min(side, len(others) - 1)]
            if not have_equal_prompts(sequence, other):
                break
        if other is None:
            raise DataError(f"{entry.where}: found no other row: loss.type = 'kto' estimates its KL from their answers")
        return with_answer_of(sequence, other).first(self.config.seq_len)

    def _margin(self, row: Row) -> float:
        """How much better the chosen answer of a pair is, for a reward model or an offset in DPO."""
        try:
            has_margin = self._are_scored or self.config.score_margin > 0
            return margin_of(row, self.config.score_margin) if has_margin else 0.0
        except RowFault as fault:
            raise BadRow(str(fault)) from fault

    def _equal_pair(self, entry: Entry, *, is_cut: bool) -> Made:
        fault = "chosen and rejected have the same tokens"
        if is_cut:
            fault = f"{self.config.section}.seq_len = {self.config.seq_len} cuts chosen and rejected to the same text"
        if self.config.on_bad_row == "skip":
            return Made(None, "bad", fault=fault)
        raise BadRow(f"{entry.where}: {fault}")

    def _end_id(self, sequence: TokenizedSample) -> int | None:
        """The special token that ends the trained part, if there is one. A text that was cut has lost its end."""
        last_trained = int(sequence.token_ids[np.flatnonzero(sequence.is_trained)[-1]])
        return last_trained if last_trained in self._special_ids and not sequence.is_cut else None

    def _split(self, sample: TokenizedSample) -> Made:
        """The pieces of a long sample that have something to train."""
        pieces = [piece for piece in sample.pieces(self.config.seq_len) if piece.targets]
        if not pieces:
            return Made(None, "untrainable", sample.inputs)
        end_id = self._end_id(sample)
        return Made(pieces[0], "split", sample.inputs, end_id is not None, end_id, more=tuple(pieces[1:]))


def as_bytes(samples: Sequence[Sample]) -> list[Any]:
    """Convert samples to bytes: checkpoints are loaded without running code, which excludes NumPy arrays."""
    return [_as_bytes(each) for each in samples]


def _as_bytes(sample: Sample) -> tuple[Any, ...]:
    if isinstance(sample, Pair):
        is_plain = sample.padding_id is None and sample.margin == 0
        key = sample.key if is_plain else (sample.key, sample.margin, sample.padding_id)
        return key, as_bytes(sample.sequences)
    if isinstance(sample, Labelled):
        mismatched = () if sample.mismatched is None else (sample.mismatched,)
        return sample.key, as_bytes([sample.sequence, *mismatched]), sample.is_desirable
    held = sample.token_ids.astype(np.int32).tobytes(), sample.is_trained.tobytes()
    if not sample.images:
        return held
    sources = (each.source for each in sample.images)
    plain = (list(source) if isinstance(source, RowImage) else source for source in sources)
    return (*held, [(source, each.tokens) for source, each in zip(plain, sample.images, strict=True)])


def _saved_image(source: str | bytes | Sequence[int], tokens: int) -> SampleImage:
    """Checkpoints of earlier versions have paths and bytes."""
    return SampleImage(source if isinstance(source, str | bytes) else RowImage(*source), tokens)


def from_bytes(saved: Sequence[Any]) -> list[Any]:
    """The samples that `as_bytes` converted."""
    samples: list[Any] = []
    for first, second, *third in saved:
        if isinstance(first, bytes):
            images = tuple(_saved_image(*each) for each in (third[0] if third else ()))
            samples.append(TokenizedSample(np.frombuffer(first, np.int32), np.frombuffer(second, bool), images=images))
        elif third:
            sequence, *mismatched = from_bytes(second)
            samples.append(Labelled(sequence, third[0], first, *mismatched))
        else:
            chosen, rejected = from_bytes(second)
            samples.append(Pair(chosen, rejected, *([first] if isinstance(first, int) else first)))
    return samples


_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
_NAMED_ROWS = 4


class BadRows:
    """Collects the rows that cannot be trained on, so that one start tells all of them, each kind once."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[tuple[str, str]]] = {}
        """Place and fault of each row, by what the faults have in common."""
        self._seen = 0
        self._can_be_skipped = False

    def collecting(self, make: Callable[[Entry], Made]) -> Callable[[Entry], Made]:
        """`make`, which keeps a bad row's fault instead of raising it."""

        def made(entry: Entry) -> Made:
            self._seen += 1
            try:
                return make(entry)
            except DataError as error:
                if isinstance(error.__context__, OutOfTime):
                    raise  # the other rows would take as long
                fault = str(error).removeprefix(f"{entry.where}: ")
                self._can_be_skipped |= isinstance(error, BadRow)
                self._kinds.setdefault(_VARYING.sub("", fault), []).append((entry.where, fault))
                return Made(None, "seen")

        return made

    def lines(self) -> list[str]:
        """One line for each kind of fault: the first row, and how many there are."""
        return [self._line(rows) for rows in self._kinds.values()]

    def _line(self, rows: Sequence[tuple[str, str]]) -> str:
        (where, fault), *others = rows
        if not others:
            return f"{where}: {fault}"
        more = ", ".join(place for place, _ in others[:_NAMED_ROWS])
        and_so_on = ", …" if len(others) > _NAMED_ROWS else ""
        return f"{where}: {fault}; so it is in {len(rows)} of {self._seen} rows: also {more}{and_so_on}"

    def advice(self, section: str) -> str:
        """How to go on without the bad rows. Empty if other faults are all there is."""
        return f'mend them, or leave them out with {section}.on_bad_row = "skip"' if self._can_be_skipped else ""

    def refuse(self, section: str) -> None:
        """Raises DataError if there are bad rows."""
        if lines := self.lines():
            raise DataError("; ".join([*lines, *filter(None, [self.advice(section)])]))


class DatasetStream:
    """Samples of a dataset, epoch after epoch. Rows that cannot be trained on are counted and skipped."""

    def __init__(
        self,
        config: SFTDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        data_axis: DataAxis,
        images: Images | None = None,
        embeddings: int | None = None,
    ) -> None:
        self.config = config
        self.data_axis = data_axis
        self.entries = setup_entries(config)
        self.counts = SampleCounts()
        self.drawn: list[str] = []
        self._places = Places(data_axis)
        self._make = SampleMaker(config, tokenizer, images=images, embeddings=embeddings)
        self._cache: dict[int, Made] = {}
        self._cached_tokens = 0
        self._warned: set[int] = set()
        self._pieces: list[Sample] = []
        """Samples of the last row that are still to come (`data.overlong = "split"`)."""

    @property
    def row_count(self) -> int:
        return self.entries.row_count

    @property
    def position(self) -> int:
        return self._places.next

    @property
    def epoch(self) -> int:
        return self.entries.epoch_of(self.position)

    def __next__(self) -> Sample:
        if self._pieces:
            return self._pieces.pop(0)
        skipped = 0
        while True:
            samples = self._samples(self.entries.at(self._places.next))
            self._places.take()
            if samples:
                self._pieces = list(samples[1:])
                return samples[0]
            skipped += 1
            # Two passes over this data rank's share without a usable row mean that it has none.
            share = 2 * self.row_count // self.data_axis.data_size + 1
            if skipped > (share if self.row_count else _MAX_SKIPPED_IN_A_ROW):
                raise DataError(self._useless_share())

    def state(self) -> dict[str, Any]:
        pieces = {"pieces": as_bytes(self._pieces)}
        return {**self._places.state(), **self.entries.state(), **pieces, "counts": asdict(self.counts)}

    def restore(self, state: Place) -> None:
        self._places.restore(state)
        self.entries.restore(state)
        self._pieces = from_bytes(state.get("pieces", []))  # checkpoints of earlier versions have none
        self.counts = SampleCounts(**state["counts"])

    def first_ones(self, count: int, faults: BadRows) -> Iterator[Made]:
        """The first `count` rows of the stream, over all data ranks, without moving or counting.

        Call it before the first sample is taken. It ends with the first epoch, if the epoch's length is known. `faults`
        collects the rows that cannot be trained on.
        """
        make = faults.collecting(self._made)
        start = self.entries.state()
        for position in range(min(count, self.row_count or self.config.shuffle_buffer)):
            entry = self.entries.at(position)
            if self.entries.epoch_of(position) > 0:
                # A stream has gone on to its second epoch, and cannot go back by itself.
                self.entries.restore(start)
                return
            yield make(entry)

    def own_share(self) -> Iterator[Made]:
        """What this data rank reads in the first epoch, without moving or counting. Rows are not streamed."""
        for position in range(self.data_axis.data_rank, self.row_count, self.data_axis.data_size):
            entry = self.entries.at(position)
            yield _waiting(self._made(entry), entry.key)

    def _useless_share(self) -> str:
        """Why this data rank has nothing to train on."""
        section, axis = self.config.section, self.data_axis
        fault = f"has a trained token within {section}.seq_len = {self.config.seq_len}"
        keys = f"{section}.loss_mask, {section}.overlong and {section}.seq_len"
        if axis.data_size == 1:
            return f"{self.config.label}: no row {fault}; check {keys}"
        share = f"no row that data rank {axis.data_rank} of {axis.data_size} reads {fault}; check {keys}"
        if self.config.shuffle:
            return f"{self.config.label}: {share}"
        same = f"Set {section}.shuffle = true: without, a rank may read the same rows in every epoch"
        return f"{self.config.label}: {share}. {same}"

    def _samples(self, entry: Entry) -> tuple[Sample, ...]:
        """The sample of a row, or several; none if it cannot be trained on."""
        made = self._made(entry)
        self.drawn.append(entry.where)
        self.counts.seen += 1
        if made.kind != "seen":
            setattr(self.counts, made.kind, getattr(self.counts, made.kind) + 1)
            self._warn(entry, made)
        return _waiting(made, entry.key).samples

    def with_images(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        return tuple(
            replace(each, images=tuple(map(self._read_again, each.images)))
            if isinstance(each, TokenizedSample) and each.images
            else each
            for each in samples
        )

    def _read_again(self, image: SampleImage) -> SampleImage:
        """Raises DataError: the row has changed since it was tokenized."""
        if not isinstance(image.source, RowImage):
            return image
        entry = self.entries.row(image.source.row)
        try:
            content = read_row(entry.read(), self.config.section, with_images=True)
            if isinstance(content, PlainText):
                raise RowFault("it is a plain text")
            _, sources = split_images(content.messages)
            return replace(image, source=located(sources[image.source.number], content.folder))
        except IndexError:
            raise DataError(f"{entry.where}: its images have changed since it was read") from None
        except (RowFault, ImageFault) as fault:
            raise DataError(f"{entry.where}: its images have changed since it was read: {fault}") from fault

    def _warn(self, entry: Entry, made: Made) -> None:
        """Warn about the first row of a kind and whenever their number has doubled, but never twice about one row."""
        if made.kind not in _WARNINGS or entry.key in self._warned:
            return
        if entry.key is not None:
            self._warned.add(entry.key)
        count = getattr(self.counts, made.kind)
        if count & (count - 1) == 0:
            line = _WARNINGS[made.kind].format(
                where=entry.where, limit=f"{self.config.section}.seq_len = {self.config.seq_len}", fault=made.fault
            )
            get_logger().warning(f"{line} ({count_of('such row', count)} so far)")

    def _made(self, entry: Entry) -> Made:
        if entry.key is not None and entry.key in self._cache:
            return self._cache[entry.key]
        made = self._make(entry)
        kept = _waiting(made, entry.key)  # bytes of images would fill the cache
        size = _TOKENS_PER_ROW + sum(map(len, kept.samples))
        if entry.key is not None and self._cached_tokens + size <= _CACHED_TOKENS:
            self._cache[entry.key] = kept
            self._cached_tokens += size
        return made


def _waiting(made: Made, key: int | None) -> Made:
    """The same, with places of images instead of the images. Rows that are streamed have no place."""
    if key is None or not any(isinstance(each, TokenizedSample) and each.images for each in made.samples):
        return made
    first, *more = (
        replace(each, images=tuple(replace(image, source=RowImage(key, at)) for at, image in enumerate(each.images)))
        if isinstance(each, TokenizedSample)
        else each
        for each in made.samples
    )
    return replace(made, sample=first, more=tuple(more))


_WARNINGS = {
    "truncated": "Cut {where}: longer than {limit}",
    "overlong": "Skipped {where}: longer than {limit}",
    "untrainable": "Skipped {where}: no trained token within {limit}",
    "bad": "Skipped {where}: {fault}",
    "unmaskable": "Skipped {where}: the chat template does not show where its messages start and end",
}


class FakeStream:
    """Generated samples, trained in full: `increasing` repeats the stream's index, `random` draws tokens."""

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

    def with_images(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        return tuple(samples)

    def state(self) -> dict[str, Any]:
        return {**self._places.state(), "counts": asdict(self.counts)}

    def restore(self, state: Place) -> None:
        self._places.restore(state)
        self.counts = SampleCounts(**state["counts"])
