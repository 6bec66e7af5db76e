"""Looks at an environment's rows: lengths, duplicates, empty prompts and answers, and rows for training and evaluation
that are the same."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from prime_rl.environments.adapters.turns import START_COLUMN
from prime_rl.environments.rewards.text import accepted_answers
from prime_rl.orchestrator.env_checks.findings import Reporter
from prime_rl.orchestrator.env_checks.prompts import CountTokens, text_of
from prime_rl.orchestrator.workers.environment import Environment
from prime_rl.utils.images import image_parts

MOST_ROWS = 20_000
"""Maximum number of rows that are read from a split, from its start."""
MOST_ENDLESS_ROWS = 256
"""Number of rows that are read from an endless environment."""


@dataclass(slots=True)
class Rows:
    """What was read of the rows of one split."""

    split: str
    count: int
    prompts: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    missing: Counter[str] = field(default_factory=Counter)
    """Rows that lack a column which others have, by column."""
    shown: list[str] = field(default_factory=list)
    """What the images of each prompt are; an empty text if it has none."""
    starts: list[str] = field(default_factory=list)
    """What a row starts, if it is a game: games with the same prompt may go on differently. Otherwise empty texts."""

    @property
    def are_games(self) -> bool:
        return any(self.starts)

    @property
    def what(self) -> str:
        """What must not occur twice."""
        return "start" if self.are_games else "prompt"

    @property
    def keys(self) -> list[str]:
        """Hash of each prompt, without differences in white space and case."""
        texts = map(" ".join, zip(self.starts, self.prompts, self.shown, strict=True))
        return [hashlib.sha256(" ".join(text.lower().split()).encode(errors="replace")).hexdigest() for text in texts]


def read_rows(environment: Environment, split: str) -> Rows:
    known = environment.num_rows
    rows = Rows(split, MOST_ENDLESS_ROWS if known is None else known)
    contents = [environment.content(row) for row in range(min(rows.count, MOST_ROWS))]
    columns = {name for content in contents for name, value in content.items() if value is not None}
    for content in contents:
        prompt = content.get("prompt") or ""
        rows.prompts.append(text_of(prompt))
        rows.answers.append(answer_of(content))
        rows.shown.append(" ".join(str(part.source) for part in image_parts(prompt)))
        rows.starts.append(str(content.get(START_COLUMN) or ""))
        rows.missing.update(name for name in columns if content.get(name) is None)
    return rows


def answer_of(content: Mapping[str, Any]) -> str:
    """The answer of a row; of a list of accepted answers, the first."""
    answer = next(iter(accepted_answers(content.get("answer"))), None)
    return "" if answer is None else str(answer)


def check_rows(rows: Rows, report: Reporter, count_tokens: CountTokens | None) -> None:
    """Report on the rows of one split."""
    subject = f"dataset: {rows.split}"
    read = f", the first {len(rows.prompts):,} read" if rows.count > len(rows.prompts) else ""
    report.found("ok" if rows.count else "fail", subject, f"{rows.count:,} rows{read}; {_lengths(rows.prompts, len)}")
    if not rows.count:
        return
    if count_tokens is not None:
        report.found("ok", subject, f"prompts in tokens: {_numbers([count_tokens(each) for each in rows.prompts])}")
    empty = [row for row, text in enumerate(rows.prompts) if not text.strip() and not rows.shown[row]]
    if empty:
        report.found("fail", subject, f"{len(empty):,} prompts are empty, the first in row {empty[0]}")
    _check_answers(rows, report, subject)
    if with_images := sum(map(bool, rows.shown)):
        report.found("ok", subject, f"{with_images:,} prompts have images, which a model reads with [model.vision]")
    for name, lacking in rows.missing.items():
        if name not in ("prompt", "answer"):
            report.found("warn", subject, f"{lacking:,} rows have no {name!r}, which others have")
    _check_duplicates(rows, report, subject)


def _check_answers(rows: Rows, report: Reporter, subject: str) -> None:
    empty = [row for row, text in enumerate(rows.answers) if not text.strip()]
    if rows.are_games:
        report.found("ok", subject, f"starts of a game: {len(set(rows.starts)):,} different ones")
    elif len(empty) == len(rows.answers):
        report.found("warn", subject, "no row has an answer, so right and wrong answers cannot be tried")
    elif empty:
        report.found("fail", subject, f"{len(empty):,} answers are empty, the first in row {empty[0]}")
    else:
        different = len(set(rows.answers))
        report.found("ok", subject, f"answers: {different:,} different ones; {_lengths(rows.answers, len)}")


def _check_duplicates(rows: Rows, report: Reporter, subject: str) -> None:
    answers = defaultdict(set)
    for key, answer in zip(rows.keys, rows.answers, strict=True):
        answers[key].add(answer)
    repeated = len(rows.prompts) - len(answers)
    if repeated:
        share = repeated / len(rows.prompts)
        report.found("warn", subject, f"{repeated:,} {rows.what}s ({share:.0%}) repeat an earlier one")
    else:
        report.found("ok", subject, f"no {rows.what} occurs twice")
    if contrary := sum(len(each) > 1 for each in answers.values()):
        report.found("fail", subject, f"{contrary:,} prompts occur with different answers")


def check_leaks(train: Rows, evaluation: Rows, report: Reporter) -> None:
    """Report on prompts of the evaluation that are trained on."""
    trained = set(train.keys)
    leaked = [row for row, key in enumerate(evaluation.keys) if key in trained]
    subject = "dataset: leaks"
    if train.prompts == evaluation.prompts:
        report.found("warn", subject, "evaluations use the training rows: add an eval_dataset to the environment")
    elif leaked:
        share = len(leaked) / len(evaluation.prompts)
        report.found(
            "fail",
            subject,
            f"{len(leaked):,} {train.what}s of the evaluation ({share:.0%}) are trained on, row {leaked[0]} first",
        )
    else:
        report.found("ok", subject, f"no {train.what} of the evaluation is trained on")


def _lengths(texts: Sequence[str], measure: Callable[[str], int]) -> str:
    return f"characters: {_numbers([measure(each) for each in texts])}" if texts else "none"


def _numbers(values: Sequence[int]) -> str:
    return f"{min(values):,} to {max(values):,}, median {round(median(values)):,}"
