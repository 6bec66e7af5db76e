"""Counts the evaluated prompts that a run trains on, and says when an evaluation uses training rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prime_rl.environments.adapters.turns import START_COLUMN
from prime_rl.orchestrator.env_checks.prompts import text_of
from prime_rl.orchestrator.workers.environment import Environment
from prime_rl.utils.images import image_parts
from prime_rl.utils.logger import count_of, get_logger

MOST_ROWS = 200_000
"""Rows of each split that are compared; reading more would hold up the start for over 10 seconds."""
METRIC = "trained_prompts/mean"
"""Share of the evaluated prompts that are trained on, between 0 and 1. The report reads it."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """The evaluated rows of one environment, and those whose prompt is trained on."""

    rows: int
    leaked: int = 0
    first: int | None = None
    """Number of the first row that is trained on."""
    falls_back: bool = False
    """Whether the environment has no `eval_dataset`, so that its training rows are evaluated."""
    is_compared: bool = True
    """Whether all training rows of the run are known."""

    @property
    def share(self) -> float:
        return self.leaked / self.rows if self.rows else 0.0

    def warning(self, what: str) -> str | None:
        """One line for people; None if no prompt is known to be trained on. `what` names the evaluation."""
        if self.falls_back and (self.leaked or not self.is_compared):
            trained = f", and {self.leaked} of its {self.rows} prompts are trained on" if self.leaked else ""
            return (
                f"{what} uses training rows, because the environment has no eval_dataset{trained}: the score of a "
                "model that trains on them is not held-out; give the environment an eval_dataset"
            )
        if self.leaked and self.leaked == self.rows:
            return f"{what} uses training rows: all of its {self.rows} prompts are trained on, so it is not held-out"
        if self.leaked:
            return (
                f"{what}: {self.leaked} of its {self.rows} prompts ({self.share:.0%}) are training rows too, row "
                f"{self.first} first: the score partly measures what was memorized; remove them from one side"
            )
        return None


def overlap(evaluated: Environment, rows: range, trained: Iterable[Environment]) -> Overlap:
    """Compare the evaluated `rows` with the training rows of all environments of a run.

    Rows that an endless environment makes as they are drawn cannot be compared.
    """
    theirs = list(trained)
    looked_at = range(rows.start, min(rows.stop, len(evaluated), rows.start + MOST_ROWS))
    identify = _Identify.for_rows([_columns(each, range(min(len(each), MOST_ROWS))) for each in theirs])
    found = [
        row
        for row, content in zip(looked_at, _columns(evaluated, looked_at), strict=True)
        if identify(content) in identify.known
    ]
    is_whole = all(each.num_rows is not None and len(each) <= MOST_ROWS for each in theirs)
    first = found[0] if found else None
    return Overlap(len(rows), len(found), first, evaluated.falls_back, is_whole and len(looked_at) == len(rows))


def tell(what: str, found: Overlap) -> None:
    """Log the comparison at the start of a run."""
    if (line := found.warning(what)) is not None:
        get_logger().warning(line)
    elif found.is_compared:
        get_logger().info(f"{what}: none of its {count_of('prompt', found.rows)} is trained on")


class _Identify:
    """What makes two rows the same prompt: the prompt; with its answer, if most training rows share their prompts.

    Games often ask the same and differ in what they hide.
    """

    def __init__(self, with_answer: bool, known: set[str]) -> None:
        self.with_answer = with_answer
        self.known = known

    @classmethod
    def for_rows(cls, environments: Sequence[Iterable[Mapping[str, Any]]]) -> _Identify:
        rows = [row for environment in environments for row in environment]
        prompts = {_key(row, with_answer=False) for row in rows}
        if 2 * len(prompts) >= len(rows):
            return cls(False, prompts)
        return cls(True, {_key(row, with_answer=True) for row in rows})

    def __call__(self, row: Mapping[str, Any]) -> str:
        return _key(row, self.with_answer)


def _key(row: Mapping[str, Any], with_answer: bool) -> str:
    """Hash of a row, without differences in white space, case and system messages."""
    prompt = next((row[name] for name in _PROMPTS if isinstance(row.get(name), str | list) and row[name]), "")
    if isinstance(prompt, list):
        shown = [str(part.source) for part in image_parts(prompt)]
        prompt = text_of([message for message in prompt if message.get("role") != "system"] or prompt)
        prompt = " ".join([prompt, *shown])
    text = " ".join(f"{row.get(START_COLUMN) or ''} {prompt}".lower().split())
    if with_answer or not text:
        text += json.dumps([row.get("answer"), row.get("info")], default=str, sort_keys=True)
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()


_PROMPTS = ("prompt", "messages", "question")
_COLUMNS = (*_PROMPTS, "answer", "info", START_COLUMN)


def _columns(environment: Environment, rows: range) -> Iterator[Mapping[str, Any]]:
    """The columns of rows that say what is asked. A `Dataset` is read in batches, 20 times as fast as row by row."""
    columns = environment.columns(rows, _COLUMNS)
    if columns is None:
        yield from (environment.content(row) for row in rows)
        return
    for batch in columns:
        names = list(batch)
        yield from (dict(zip(names, values, strict=True)) for values in zip(*batch.values(), strict=True))
