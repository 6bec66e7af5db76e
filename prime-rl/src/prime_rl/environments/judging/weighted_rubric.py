"""Weighted rubrics, in the scheme of HealthBench (Arora et al. 2025): a judge says which criteria an answer
meets; the score is the points of these divided by all positive points, clipped to 0..1."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

PROMPT = """A doctor checks an answer to a patient.

Conversation:
{conversation}

Answer:
{answer}

Criterion: {criterion}

Does the answer meet the criterion? Reply with one word, yes or no."""
MAX_TOKENS = 8
"""Enough for a verdict. A model that reasons first needs more."""
_VERDICT = re.compile(r"\b(yes|no|true|false)\b", re.IGNORECASE)


class RubricFault(ValueError):
    """A file of cases cannot be used."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """What an answer may do, and its points, which are negative for what it should not do."""

    text: str
    points: float


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """An answer, and for each criterion whether it meets it, as a person says."""

    text: str
    met: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation, its rubric, and answers that a person has graded."""

    prompt: tuple[Mapping[str, str], ...]
    rubric: tuple[Criterion, ...]
    graded: tuple[GradedAnswer, ...] = ()

    @classmethod
    def of_row(cls, row: Any) -> Self:
        """A row of HealthBench, which has `prompt` and `rubrics`. `graded` is ours. Raises RubricFault."""
        try:
            prompt = tuple({"role": str(each["role"]), "content": str(each["content"])} for each in row["prompt"])
            rubric = tuple(Criterion(str(each["criterion"]), float(each["points"])) for each in row["rubrics"])
            graded = tuple(GradedAnswer(str(each["answer"]), tuple(each["met"])) for each in row.get("graded", ()))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise RubricFault(
                f"needs prompt (messages) and rubrics (criterion, points): {type(error).__name__}: {error}"
            ) from error
        if not prompt or not any(criterion.points > 0 for criterion in rubric):
            raise RubricFault("needs a message, and a criterion with positive points: no answer could score")
        if not all(math.isfinite(criterion.points) for criterion in rubric):
            raise RubricFault("points: one is no finite number")
        if any(list(map(type, each.met)) != [bool] * len(rubric) for each in graded):
            raise RubricFault(f"each graded answer needs {len(rubric)} values in met, true or false for each criterion")
        return cls(prompt, rubric, graded)


def read_cases(file: Path) -> list[Case]:
    """Raises RubricFault with file and line."""
    cases = []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # JSON may hold other line separators, such as U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise RubricFault(f"{file}: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            cases += [Case.of_row(json.loads(line))] if line.strip() else []
        except ValueError as error:
            raise RubricFault(f"{file}:{number}: {error}") from error
    if not cases:
        raise RubricFault(f"{file}: holds no case")
    return cases


def score(rubric: Sequence[Criterion], met: Sequence[bool | None]) -> float:
    """0..1. None, no clear verdict, counts as not met."""
    possible = sum(criterion.points for criterion in rubric if criterion.points > 0)
    achieved = sum(criterion.points for criterion, is_met in zip(rubric, met, strict=True) if is_met)
    return min(1.0, max(0.0, achieved / possible))


def verdict(text: str) -> bool | None:
    """What a judge says: its first yes, no, true or false. None without one."""
    found = _VERDICT.search(text)
    return None if found is None else found[1].lower() in ("yes", "true")


class RubricJudge:
    """Asks a judge about one criterion at a time."""

    def __init__(
        self,
        client: Any,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        max_tokens: int | None = MAX_TOKENS,
        max_concurrent: int | None = None,
    ) -> None:
        """`client` is an `openai.AsyncOpenAI`. `max_tokens` is asked for unless `sampling_args` limit the answer. None
        for `max_concurrent` sets no limit."""
        self._client = client
        self._model = model
        own = dict(sampling_args or {})
        has_limit = max_tokens is None or not {"max_tokens", "max_completion_tokens"}.isdisjoint(own)
        self._sampling = own if has_limit else {"max_tokens": max_tokens, **own}
        self._turns = nullcontext() if max_concurrent is None else asyncio.Semaphore(max_concurrent)

    async def met(
        self, prompt: Sequence[Mapping[str, Any]], answer: str, rubric: Sequence[Criterion]
    ) -> list[bool | None]:
        """The verdict on each criterion."""
        return list(await asyncio.gather(*(self._met(prompt, answer, criterion) for criterion in rubric)))

    async def _met(self, prompt: Sequence[Mapping[str, Any]], answer: str, criterion: Criterion) -> bool | None:
        conversation = "\n".join(f"{each['role']}: {each['content']}" for each in prompt)
        asked = PROMPT.format(conversation=conversation, answer=answer, criterion=criterion.text)
        async with self._turns:
            reply = await self._client.chat.completions.create(
                model=self._model, messages=[{"role": "user", "content": asked}], **self._sampling
            )
        return verdict(str(reply.choices[0].message.content or ""))
