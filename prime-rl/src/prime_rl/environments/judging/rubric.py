"""The environment `rubric`: questions whose answers a judge grades against weighted criteria, as in HealthBench.

The judge decides for each criterion whether an answer meets it. The score is the points of the criteria that are met
divided by all positive points, clipped to 0..1 (Arora et al. 2025).
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import verifiers as vf

from prime_rl.environments.rewards.text import text_of, without_thinking
from prime_rl.utils.errors import UserError

PROMPT = """A doctor checks an answer to a patient.

Conversation:
{conversation}

Answer:
{answer}

Criterion: {criterion}

Does the answer meet the criterion? Reply with one word, yes or no."""
MAX_TOKENS = 8
"""Token limit of a verdict. A model that reasons first needs more."""
_VERDICT = re.compile(r"\b(yes|no|true|false)\b", re.IGNORECASE)
_VERDICTS = "rubric_verdicts"


def load_environment(
    cases: str,
    judge_client: Any,
    judge_model: str,
    judge_sampling_args: Mapping[str, Any] | None = None,
    judge_max_tokens: int | None = MAX_TOKENS,
    num_eval: int = 0,
    system_prompt: str | None = None,
) -> vf.Environment:
    """Load the environment. `cases` is a file in HealthBench's format.

    The last `num_eval` cases are for evaluation; 0 uses all cases for both. `judge_max_tokens` limits a verdict, unless
    the judge's `sampling` does; None sets no limit.

    Raises:
        RubricFault: the file cannot be used.
    """
    import verifiers as vf  # here: `agreement` needs only the judge
    from datasets import Dataset

    rows = [
        {
            "prompt": [dict(message) for message in case.prompt],
            "info": {"rubric": [{"text": each.text, "points": each.points} for each in case.rubric]},
        }
        for case in read_cases(Path(cases))
    ]
    if not 0 <= num_eval < len(rows):
        raise ValueError(f"num_eval = {num_eval}: {cases} has {len(rows)} cases, and training needs one")
    judge = RubricJudge(judge_client, judge_model, judge_sampling_args, judge_max_tokens)

    async def rubric_score(prompt: Any, completion: Any, info: Mapping[str, Any], state: vf.State) -> float:
        rubric = [Criterion(each["text"], each["points"]) for each in info["rubric"]]
        answer = without_thinking(text_of(completion, role="assistant"))
        met = await judge.met(_plain(prompt), answer, rubric)
        state[_VERDICTS] = met
        return score(rubric, met)

    def criteria_met(state: vf.State) -> float:
        """Share of criteria that the answer meets, without points."""
        return _share(state, True)

    def unclear_verdicts(state: vf.State) -> float:
        """Share of criteria on which the judge said neither yes nor no."""
        return _share(state, None)

    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows[: len(rows) - num_eval]),
        eval_dataset=Dataset.from_list(rows[-num_eval:]),
        system_prompt=system_prompt,
        rubric=vf.Rubric(funcs=[rubric_score, criteria_met, unclear_verdicts], weights=[1.0, 0.0, 0.0]),
    )


def _share(state: Mapping[str, Any], wanted: bool | None) -> float:
    verdicts = state.get(_VERDICTS) or []
    return sum(each is wanted for each in verdicts) / len(verdicts) if verdicts else 0.0


def _plain(messages: Any) -> list[dict[str, str]]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [{"role": str(each["role"]), "content": str(each.get("content") or "")} for each in messages]


# The rubric of HealthBench, and the judge that applies it.


class RubricFault(UserError, ValueError):
    """The user's mistake: a file of cases cannot be used."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """One criterion and its points, which are negative for what an answer should not do."""

    text: str
    points: float


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """An answer with a person's verdict on each criterion."""

    text: str
    met: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation, its criteria, and answers that a person has graded."""

    prompt: tuple[Mapping[str, str], ...]
    rubric: tuple[Criterion, ...]
    graded: tuple[GradedAnswer, ...] = ()

    @classmethod
    def of_row(cls, row: Any) -> Self:
        """Read a row of HealthBench (`prompt`, `rubrics`), with our addition `graded`. Raises RubricFault."""
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
            raise RubricFault("points: one is not a finite number")
        if any(list(map(type, each.met)) != [bool] * len(rubric) for each in graded):
            raise RubricFault(f"each graded answer needs {len(rubric)} values in met, true or false for each criterion")
        return cls(prompt, rubric, graded)


def read_cases(file: Path) -> list[Case]:
    """Read a file of cases. Raises RubricFault with file and line."""
    cases = []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may contain U+2028
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
    """Score of an answer, 0 to 1. None (no clear verdict) counts as not met."""
    possible = sum(criterion.points for criterion in rubric if criterion.points > 0)
    achieved = sum(criterion.points for criterion, is_met in zip(rubric, met, strict=True) if is_met)
    return min(1.0, max(0.0, achieved / possible))


def verdict(text: str) -> bool | None:
    """The first yes, no, true or false in a judge's reply. None without one."""
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
        """`client` is an `openai.AsyncOpenAI`. `max_tokens` applies unless `sampling_args` set a limit. None for
        `max_concurrent` sets no limit."""
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
