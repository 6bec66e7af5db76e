"""The rows that SFT reads: datasets, which of their messages are trained on, batches and packing."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from math import isclose
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from prime_rl.configs.ranges import Count, Fraction, NaturalSeed
from prime_rl.utils.pydantic_config import BaseConfig, raise_faults

TokenLoss = Literal["cross_entropy", "dft", "phi"]
"""The loss of a token: its cross-entropy, perhaps weighted by a function of its probability p, as a constant.

`dft`: p (Wu et al. 2025, On the Generalization of SFT). `phi`: p (1 - p) (Zhang et al. 2025, CHORD)."""


class LossMaskConfig(BaseConfig):
    """Roles whose messages are trained on."""

    system: bool = False
    """System messages."""

    user: bool = False
    """User messages."""

    assistant: bool = True
    """Assistant messages."""

    tool: bool = False
    """Tool messages."""


class ColumnsConfig(BaseConfig):
    """Names that the data uses for what SFT reads. With any of the columns set, the others are not read, except
    `tools`, `chat_template_kwargs` and `margin`."""

    messages: str | None = None
    """Column of the messages."""

    prompt: str | None = None
    """Column of the prompt."""

    response: str | None = None
    """Column of the assistant's answer to `prompt`."""

    chosen: str | None = None
    """Column of the better answer, in preferences."""

    rejected: str | None = None
    """Column of the worse answer, in preferences."""

    margin: str | None = None
    """Column of how much better the chosen answer is, for a reward model."""

    completion: str | None = None
    """Column of the text that continues `prompt`."""

    label: str | None = None
    """Column that says whether the answer is good, in preferences without pairs."""

    instruction: str | None = None
    """Column of the instruction."""

    input: str | None = None
    """Column of the instruction's input."""

    output: str | None = None
    """Column of the answer to `instruction`."""

    system: str | None = None
    """Column of the system message."""

    tools: str | None = None
    """Column of the tools."""

    images: str | None = None
    """Column of the row's images."""

    text: str | None = None
    """Column of plain text."""

    role: str | None = None
    """Key of a message's role."""

    content: str | None = None
    """Key of a message's content."""

    @property
    def of_rows(self) -> dict[str, str]:
        """The columns that are set, by our name."""
        return {ours: theirs for ours, theirs in self if theirs is not None and ours not in ("role", "content")}


class RowFormatConfig(BaseConfig):
    """How rows are read."""

    columns: ColumnsConfig = ColumnsConfig()
    """Names of columns that differ from those that SFT knows."""

    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = Field({})
    """Roles of the data that differ from those that SFT knows, such as `patient = "user"`."""


class SourceConfig(RowFormatConfig):
    """One of several datasets. Without `columns` and `roles` it takes those of `data`."""

    name: str
    """Dataset: a hub id, a directory or a file."""

    subset: str | None = None
    """Subset. None takes the default one."""

    split: str = "train"
    """Split."""

    weight: float = Field(1.0, gt=0)
    """Share of the samples, relative to the weights of the other datasets."""


NOT_SET: Any = None
"""Default of a number without which no run starts. A config can be read and completed before it is known."""


def _known_or_not_set(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return NOT_SET if value is NOT_SET else check(value)


HeldRows = Literal["samples", "pairs", "scored pairs", "labels", "mismatched labels"]
"""The kind of rows in a dataset: SFT's; pairs of a chosen and a rejected answer; pairs for a reward model, which scores
each answer at its last token; answers with a label, good or bad; or such answers, each beside another row's answer to
the same prompt, from which KTO estimates its KL."""


STACK_MULTIPLE = 256
"""`stack` pads sequences to a multiple of this length."""


class BaseDataConfig(BaseConfig):
    """Batches and packing."""

    batch_size: Count = 128
    """Packed sequences per step, over all ranks."""

    seq_len: Annotated[Count, WrapValidator(_known_or_not_set)] = Field(NOT_SET)
    """Length of a packed sequence, and maximum length of a sample, in tokens. A run needs it, here or as
    `model.seq_len`."""

    pack_function: Literal["best_fit", "cat", "stack"] = "best_fit"
    """How samples fill rows of `seq_len * micro_batch_size` tokens. `best_fit`: whole samples, chosen to fill rows.
    `cat`: in order, cutting each row's last sample. `stack`: samples of similar length. Samples never attend to each
    other."""

    micro_batch_size: Count = 1
    """Packed sequences that a rank computes at once."""

    @property
    def holds(self) -> HeldRows:
        """What each row is."""
        return "samples"

    @property
    def holds_pairs(self) -> bool:
        """Whether each row is a preference: a chosen and a rejected answer."""
        return self.holds in ("pairs", "scored pairs")

    @property
    def section(self) -> str:
        """Its key in the config, for messages."""
        return "data"

    @property
    def row_tokens(self) -> int:
        """Tokens that a rank computes at once. A row of preferences has room for two sequences of `seq_len`."""
        return self.seq_len * self.micro_batch_size * (2 if self.holds_pairs else 1)

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        if self.batch_size % self.micro_batch_size != 0:
            size, rows = self.batch_size, self.micro_batch_size
            raise ValueError(f"batch_size ({size}) is not a multiple of micro_batch_size ({rows})")
        return self


def length_fault(data: BaseDataConfig, section: str = "data") -> str | None:
    """Why a run cannot start without a length of its rows."""
    if data.seq_len is not NOT_SET:
        return None
    return (
        f"{section}.seq_len is not set: give the tokens of a packed row, and so of the longest sample, such as "
        f"{section}.seq_len = 2048 (earlier versions took 128)"
    )


def batch_fault(data: BaseDataConfig, data_size: int, group: str = "") -> str | None:
    """Why `data.batch_size` rows cannot be shared out to `data_size` processes, or groups of `group` processes."""
    is_whole = data.batch_size % (data_size * data.micro_batch_size) == 0
    sharers = f"{data_size} groups of {group} processes" if group else f"{data_size} processes"
    product = f"{sharers} x {data.section}.micro_batch_size = {data.micro_batch_size}"
    return None if is_whole else f"{data.section}.batch_size = {data.batch_size} is not a multiple of {product}"


def stack_fault(data: BaseDataConfig) -> str | None:
    """Why `pack_function = "stack"` cannot fill rows of `seq_len`."""
    is_known = data.seq_len is not NOT_SET
    if data.pack_function == "stack" and is_known and data.seq_len % STACK_MULTIPLE != 0:
        return (
            f"{data.section}.pack_function = 'stack' needs a {data.section}.seq_len in steps of {STACK_MULTIPLE} "
            f"(got {data.seq_len})"
        )
    return None


class FakeDataConfig(BaseDataConfig):
    """Generated tokens, for benchmarks."""

    type: Literal["fake"] = "fake"
    """Generated."""

    length: Literal["fixed", "variable"] = "fixed"
    """Lengths of the samples."""

    input_ids: Literal["increasing", "random"] = "increasing"
    """Tokens of the samples."""


@dataclass(frozen=True, slots=True)
class Split:
    """One side of a dataset of which a part is held out for validation: `val.size` or `val.fraction`."""

    size: int | None
    fraction: float | None
    seed: int
    is_validation: bool
    """Whether this is the validation side. The rest is trained on."""

    def __str__(self) -> str:
        return f"val.size = {self.size}" if self.size is not None else f"val.fraction = {self.fraction}"


class SFTDataConfig(BaseDataConfig, RowFormatConfig):
    """A dataset of conversations."""

    type: Literal["sft"] = "sft"
    """Conversations."""

    name: str = "PrimeIntellect/Reverse-Text-SFT"
    """Dataset: a hub id, a directory, or a JSONL, JSON, CSV, TSV, Excel, Parquet or Arrow file, or a document (.txt,
    .md); text files also compressed (.gz, .zst)."""

    sources: list[SourceConfig] | None = Field(None, min_length=1)
    """Several datasets instead of `name`, drawn from by weight. None reads `name`."""

    subsets: list[str] | None = None
    """Subsets. None takes the default one."""

    splits: list[str] | None = None
    """Splits. None takes `train`."""

    probabilities: list[Fraction] | None = None
    """Share of each subset or split. None takes a row of each in turn."""

    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "all_exhausted"
    """Whether an epoch ends when the first or the last subset, split or source is exhausted. Others start again."""

    shuffle: bool = True
    """Shuffle in every epoch."""

    seed: NaturalSeed = 0
    """Seed of the shuffle. The epoch number is added to it."""

    streaming: bool = False
    """Read rows as they are needed instead of loading all of them first. Shuffles within `shuffle_buffer` rows."""

    shuffle_buffer: Count = 10_000
    """Number of rows that are shuffled together when streaming."""

    overlong: Literal["truncate", "split", "drop", "error"] = "truncate"
    """What to do with samples of more than `seq_len` tokens. `split`, for long documents, makes several samples and so
    trains every token; a later sample does not see the earlier ones."""

    template_date: date | None = None
    """Date for a chat template that asks for today's (`strftime_now`), such as "2026-11-26". None takes the day on
    which the run began, also after a resume."""

    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a row that has no conversation or an empty answer. `error` stops the run and names column and
    line; `skip` leaves it out, and counts it."""

    max_untrainable_share: Fraction = 0.5
    """Stop before training if more than this share of the rows has no trained token within `seq_len`, or is skipped by
    `on_bad_row`."""

    loss_mask: LossMaskConfig = LossMaskConfig()
    """Roles whose messages are trained on."""

    ignored_keys: list[str] = Field([])
    """Keys of messages and tools that the chat template may leave out. Any other key that leaves no trace in the text
    stops the run. Common metadata, such as `id` and `timestamp`, need not be listed."""

    _section: str = PrivateAttr("data")
    _split: Split | None = PrivateAttr(None)
    _holds: HeldRows = PrivateAttr("samples")
    _score_margin: float = PrivateAttr(0.0)

    @property
    def holds(self) -> HeldRows:
        return self._holds

    @property
    def score_margin(self) -> float:
        """Times the difference of the scores of a pair, its margin; 0 gives none."""
        return self._score_margin

    def hold_pairs(self, *, are_scored: bool = False, score_margin: float = 0.0) -> None:
        """Set `holds` and `score_margin`. Call it only in validators."""
        self._holds = "scored pairs" if are_scored else "pairs"
        self._score_margin = score_margin

    def hold_labels(self, *, mismatched: bool) -> None:
        """Set `holds`. Call it only in validators."""
        self._holds = "mismatched labels" if mismatched else "labels"

    @property
    def split(self) -> Split | None:
        """The side of a split that these rows are. None takes all rows."""
        return self._split

    def take_side(self, split: Split) -> None:
        """Set `split`. Call it only in validators."""
        self._split = split

    @property
    def section(self) -> str:
        return self._section

    def name_section(self, section: str) -> None:
        """Set `section`. Call it only in validators."""
        self._section = section

    @property
    def label(self) -> str:
        """The dataset, in messages."""
        if self.sources is None:
            return f"{self.section}.name = {self.name}"
        return f"{self.section}.sources = {', '.join(source.name for source in self.sources)}"

    @property
    def shares(self) -> list[float] | None:
        """Probability of drawing from each source, subset or split. None takes turns."""
        if self.sources is None:
            return self.probabilities
        total = sum(source.weight for source in self.sources)
        return [source.weight / total for source in self.sources]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        raise_faults(list(self._source_faults()) or list(self._length_faults()) or self._share_faults())
        return self

    def _source_faults(self) -> Iterator[str]:
        for key in ("name", "subsets", "splits", "probabilities") if self.sources is not None else ():
            # A resolved config has every key: a default beside sources is not the user's choice.
            if getattr(self, key) != type(self).model_fields[key].default:
                yield f"sources and {key} are both set: name each dataset in sources, with its subset, split and weight"

    def _length_faults(self) -> Iterator[str]:
        for one, other in (("subsets", "splits"), ("probabilities", "subsets"), ("probabilities", "splits")):
            values, others = getattr(self, one), getattr(self, other)
            if values is not None and others is not None and len(values) != len(others):
                yield f"{one} has {len(values)} entries and {other} {len(others)}: give as many"

    def _share_faults(self) -> Iterator[str]:
        shares = self.probabilities
        if shares is not None and (min(shares, default=0) < 0 or not isclose(sum(shares), 1, abs_tol=1e-8)):
            yield f"probabilities must be at least 0 and add up to 1 (got {shares})"


DataConfig = Annotated[FakeDataConfig | SFTDataConfig, Field(discriminator="type")]
