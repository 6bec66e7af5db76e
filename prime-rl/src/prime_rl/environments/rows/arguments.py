"""Arguments of the environment `rows`: `[orchestrator.env.args]`."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from prime_rl.configs.ranges import Count, Fraction, Seed, WholeNumber
from prime_rl.environments.rewards.registry import Reward
from prime_rl.environments.rows.formats import TRAINED_ELSEWHERE, find_format
from prime_rl.utils.pydantic_config import BaseConfig, ConfigError, raise_faults
from prime_rl.utils.pydantic_config.faults import faults_of
from prime_rl.utils.pydantic_config.layers import Layer

Scalar = str | int | float | bool
Weight = Annotated[float, Field(gt=0, le=1e9)]


class DatasetConfig(BaseConfig):
    """One dataset of a mixture."""

    path: str | None = None
    """A file (JSONL, JSON, CSV, TSV, Parquet, Arrow; text files also .gz and .zst), a directory of files, a directory
    that `datasets` saved, a dataset on the hub, or `s3://BUCKET/KEY`. Only `dummy` needs none."""

    type: str | None = None
    """Format of the rows, such as `gsm8k`. None, and AReaL's `rl`, find it in the path, and else take `jsonl`."""

    name: str | None = None
    """Name in metrics and messages. None takes the format, or the name of the file."""

    subset: str | None = None
    """Subset of a dataset on the hub, or a folder in a directory of files."""

    split: str = "train"
    """Split."""

    weight: Weight = 1.0
    """How often a row of this dataset comes next, relative to the others, while both have rows left. For
    `mode = "weighted"`."""

    count: Count | None = None
    """Number of rows to take. None takes all."""

    shuffle: bool = True
    """Shuffle the rows, always with `seed`. A dataset with `order` is never shuffled."""

    order: Path | None = None
    """A curriculum: a text file, here or on S3, with one prompt id per line. Rows that it does not name are left
    out."""

    id: str | None = None
    """Prompt id: a column, `content` (a hash of question and answer), or `row` (the row's number in the source, before
    any filter). None takes the id column of the format, else the content."""

    columns: dict[Literal["prompt", "answer"], str] = Field({})
    """Columns with the prompt and the answer, if they are not those of the format."""

    template: str | None = None
    """Text of the question, with names of columns: `"{question}\\nGive a number."`. Double the braces of the text.
    None takes the template of the environment or of the format."""

    system_prompt: str | None = None
    """System message. None takes the one of the environment."""

    rewards: list[Reward] | None = None
    """Reward functions for these rows: names, or `{ fn, weight, args, timeout_s, name }`.
    None takes those of the environment, or the one of the format."""

    level: list[Scalar] | None = None
    """Keep rows with one of these values in the column `level`; 5 also finds `Level 5`."""

    difficulty: list[Scalar] | None = None
    """Keep rows with one of these values in the column `difficulty`."""

    where: dict[str, list[Scalar]] = Field({})
    """Keep rows with one of the values in each of these columns: `{ subject = ["algebra"] }`."""

    min_chars: WholeNumber = 0
    """Fewest characters of the prompt."""

    max_chars: Count | None = None
    """Most characters of the prompt. Longer rows are left out, never cut."""

    min_tokens: WholeNumber = 0
    """Fewest tokens of the prompt's texts. Needs `tokenizer`."""

    max_tokens: Count | None = None
    """Most tokens of the prompt's texts. Needs `tokenizer`."""

    pass_rates: Path | None = None
    """A table of `medarc_train passk`, as JSONL or CSV. Needed by `min_pass_rate` and `max_pass_rate`."""

    min_pass_rate: Fraction | None = None
    """Keep rows whose pass rate in the table is at least this."""

    max_pass_rate: Fraction | None = None
    """Keep rows whose pass rate in the table is at most this."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_faults(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        if self.type in TRAINED_ELSEWHERE:
            yield f"type = {self.type!r} is for {TRAINED_ELSEWHERE[self.type]}; environments read `rl`"
            return
        try:
            found = find_format(self.type, self.path)
        except ValueError as error:
            yield f"type: {error}"
            return
        if self.path is None and not found.makes_rows:
            yield "path: give a file, a directory or a dataset on the hub"
        for low, high in (("min_chars", "max_chars"), ("min_tokens", "max_tokens"), ("min_pass_rate", "max_pass_rate")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                yield f"{low} ({least:g}) is above {high} ({most:g})"
        has_band = self.min_pass_rate is not None or self.max_pass_rate is not None
        if has_band and self.pass_rates is None:
            yield "min_pass_rate and max_pass_rate need `pass_rates`, a table that `medarc_train passk` writes"
        if self.pass_rates is not None and not has_band:
            yield "pass_rates has no effect without min_pass_rate or max_pass_rate: set one of them"
        if self.template is not None:
            yield from template_faults("template", self.template)

    @property
    def title(self) -> str:
        """The dataset's name in metrics and messages."""
        if self.name is not None:
            return self.name
        found = find_format(self.type, self.path)
        if found.name != "jsonl" or self.path is None:
            return found.name
        return Path(self.path).name.partition(".")[0] or found.name


class RowsConfig(BaseConfig):
    """Arguments of the environment `rows`."""

    datasets: list[DatasetConfig] = Field(min_length=1)
    """The datasets to train on."""

    eval_datasets: list[DatasetConfig] = Field([])
    """The datasets to evaluate on. Empty takes the others."""

    mode: Literal["weighted", "sequential"] = "weighted"
    """`weighted` draws the dataset of the next row by the weights of those that have rows left; `sequential` goes
    through one dataset after the other."""

    seed: Seed = 0
    """Seed of shuffling and mixing."""

    system_prompt: str | None = None
    """System message of rows without one."""

    template: str | None = None
    """Text of the question, with names of columns: `"{question}\\nGive a number."`."""

    rewards: list[Reward] | None = None
    """Reward functions: names, or `{ fn, weight, args, timeout_s, name }`.
    None takes the one of each dataset's format."""

    tokenizer: str | None = None
    """Model, or folder with a `tokenizer.json`, that counts `min_tokens` and `max_tokens`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_faults(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        for key in ("datasets", "eval_datasets"):
            titles: list[str] = []
            for index, dataset in enumerate(getattr(self, key)):
                if dataset.title in titles:
                    first = titles.index(dataset.title)
                    yield f"{key}[{index}] and {key}[{first}] are both called {dataset.title!r}: set `name`"
                titles.append(dataset.title)
                if (dataset.min_tokens or dataset.max_tokens) and self.tokenizer is None:
                    yield f"{key}[{index}]: min_tokens and max_tokens need `tokenizer`, such as the model's folder"
        if self.template is not None:
            yield from template_faults("template", self.template)


def template_faults(key: str, template: str) -> Iterator[str]:
    """Faults of a template, one line each."""
    try:
        names = [name for _, name, *_ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        yield f"{key}: {error}; double the braces that belong to the text, as in \\boxed{{{{}}}}"
        return
    for name in names:
        if not name.isidentifier():
            yield f"{key}: {{{name}}} is not the name of a column; double the braces that belong to the text"


def read_rows_config(args: Mapping[str, Any]) -> RowsConfig:
    """Check the arguments of the environment. Raises ConfigError with one line per fault."""
    try:
        return RowsConfig.model_validate(dict(args))
    except ValidationError as error:
        raise ConfigError(faults_of(RowsConfig, error, [Layer("args", dict(args))])) from error
