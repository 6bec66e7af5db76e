"""The built-in environment `rubric`: questions whose answers a judge grades against a weighted rubric."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset

from prime_rl.environments.judging.weighted_rubric import MAX_TOKENS, Criterion, RubricJudge, read_cases, score
from prime_rl.environments.rewards.text import text_of, without_thinking

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
    """`cases` is a file in HealthBench's format. Its last `num_eval` cases are for evaluation; 0 uses all for both.
    `judge_max_tokens` limits a verdict, unless the judge's `sampling` does; None does not.

    Raises:
        RubricFault: the file cannot be used.
    """
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


def _share(state: vf.State, wanted: bool | None) -> float:
    verdicts = state.get(_VERDICTS) or []
    return sum(each is wanted for each in verdicts) / len(verdicts) if verdicts else 0.0


def _plain(messages: Any) -> list[dict[str, str]]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [{"role": str(each["role"]), "content": str(each.get("content") or "")} for each in messages]
