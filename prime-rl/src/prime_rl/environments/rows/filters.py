"""Which problems of a dataset are kept. Filters never change an id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.environments.rows.arguments import DatasetConfig, Scalar
from prime_rl.environments.rows.formats import words
from prime_rl.environments.rows.pass_rates import PassRate, read_pass_rates
from prime_rl.environments.rows.problems import Problem
from prime_rl.environments.rows.sources import RowsFault

CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Filter:
    """One reason to leave a problem out."""

    name: str
    """The keys of the config."""
    keeps: Callable[[Problem], bool]


def filters_of(dataset: DatasetConfig, count_tokens: CountTokens | None) -> list[Filter]:
    """The filters that a dataset asks for, in the order in which they are applied. Raises RowsFault."""
    return list(_filters(dataset, count_tokens))


def _filters(dataset: DatasetConfig, count_tokens: CountTokens | None) -> Iterator[Filter]:
    columns: dict[str, Sequence[Scalar]] = dict(dataset.where)
    if dataset.level is not None:
        columns["level"] = dataset.level
    if dataset.difficulty is not None:
        columns["difficulty"] = dataset.difficulty
    for column, values in columns.items():
        yield _by_column(dataset, column, values)
    if dataset.min_chars or dataset.max_chars:
        yield _by_length("chars", len, dataset.min_chars, dataset.max_chars)
    if (dataset.min_tokens or dataset.max_tokens) and count_tokens is not None:
        yield _by_length("tokens", count_tokens, dataset.min_tokens, dataset.max_tokens)
    if dataset.pass_rates is not None:
        yield _by_pass_rate(dataset, read_pass_rates(dataset.pass_rates))


def _by_column(dataset: DatasetConfig, column: str, values: Sequence[Scalar]) -> Filter:
    wanted = {words(str(value)) for value in values}
    # `Level 5` of hendrycks_math is level 5.
    wanted |= {f"{words(column)}_{value}" for value in wanted}

    def keeps(problem: Problem) -> bool:
        if column not in problem.row:
            raise RowsFault(
                f"{dataset.title}: a row has no column {column!r} to filter by; it has {', '.join(problem.row)}"
            )
        value = problem.row[column]
        return value in values or (isinstance(value, str) and words(value) in wanted)

    return Filter(f"{column} in {', '.join(map(str, values))}", keeps)


def _by_length(unit: str, length: CountTokens, least: int, most: int | None) -> Filter:
    name = f"{least or ''}..{most or ''} {unit}"
    return Filter(name, lambda problem: least <= length(problem.text) <= (most or float("inf")))


def _by_pass_rate(dataset: DatasetConfig, rates: Mapping[str, PassRate]) -> Filter:
    low, high = dataset.min_pass_rate, dataset.max_pass_rate
    least, most = (0.0 if low is None else low), (1.0 if high is None else high)

    def keeps(problem: Problem) -> bool:
        rate = rates.get(problem.id)
        return rate is not None and least <= rate.rate <= most

    return Filter(f"pass rate {least:g}..{most:g}", keeps)


def token_counter(tokenizer: str) -> CountTokens:
    """Counts the tokens of a text. Raises RowsFault without a tokenizer of that name."""
    from tokenizers import Tokenizer

    file = Path(tokenizer) / "tokenizer.json" if Path(tokenizer).is_dir() else Path(tokenizer)
    try:
        loaded: Any = Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(tokenizer)
    except Exception as error:
        raise RowsFault(f"tokenizer = {tokenizer}: there is no tokenizer.json: {error}") from error
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)
