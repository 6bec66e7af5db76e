"""Weighted rubrics: scores, files of cases, and the agreement of a judge with a person, against a judge played here."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl.environments.builtin import built_in_module
from prime_rl.environments.judging.agreement import Agreement, measure
from prime_rl.environments.judging.rubric import (
    Criterion,
    RubricFault,
    RubricJudge,
    load_environment,
    read_cases,
    score,
    verdict,
)

CASES = Path(__file__).resolve().parents[3] / "examples" / "rubric" / "cases.jsonl"


def judge_that(says: Callable[[str], str]) -> Any:
    """A client whose model answers a prompt as `says`."""

    async def create(model: str, messages: list[dict[str, str]], **sampling: Any) -> Any:
        message = SimpleNamespace(content=says(messages[-1]["content"]))
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))


def person() -> Callable[[str], str]:
    """Says what the graded answers say."""
    truth = {
        (answer.text, criterion.text): is_met
        for case in read_cases(CASES)
        for answer in case.graded
        for criterion, is_met in zip(case.rubric, answer.met, strict=True)
    }

    def says(prompt: str) -> str:
        found = re.search(r"\nAnswer:\n(.*)\n\nCriterion: (.*)\n\n", prompt)
        assert found is not None
        return "Yes." if truth[found[1], found[2]] else "No, it does not."

    return says


def test_a_score_is_the_share_of_positive_points_clipped_to_0_and_1() -> None:
    rubric = [Criterion("good", 5), Criterion("better", 3), Criterion("bad", -6)]
    assert score(rubric, [True, True, False]) == 1
    assert score(rubric, [True, False, False]) == 5 / 8
    assert score(rubric, [True, True, True]) == 2 / 8
    assert score(rubric, [False, False, True]) == 0
    assert score(rubric, [None, None, None]) == 0
    assert [verdict(text) for text in ("Yes.", "no", '{"criteria_met": true}', "know", "", "NO, yes")] == [
        True, False, True, None, None, False,
    ]  # fmt: skip


async def test_agreement_is_1_for_the_person_and_0_for_a_judge_that_always_says_the_same() -> None:
    cases = read_cases(CASES)
    right = await measure(RubricJudge(judge_that(person()), "m"), cases)
    assert (right.accuracy, right.kappa, right.unclear, right.mean_score_error) == (1, 1, 0, 0)
    always = await measure(RubricJudge(judge_that(lambda prompt: "yes"), "m"), cases)
    assert always.kappa == 0
    assert always.accuracy == pytest.approx(1 - always.baseline)
    silent = await measure(RubricJudge(judge_that(lambda prompt: "maybe"), "m"), cases)
    assert (silent.unclear, silent.accuracy) == (1, pytest.approx(silent.baseline))
    # Cohen's own arithmetic: 20 yes-yes, 5 yes-no, 10 no-yes, 15 no-no; po = 0.7, pe = 0.5.
    pairs = [(True, True)] * 20 + [(True, False)] * 5 + [(False, True)] * 10 + [(False, False)] * 15
    table = Agreement(tuple(pairs), (0.0,))
    assert (table.accuracy, table.kappa) == (0.7, pytest.approx(0.4))
    assert "accuracy 0.70 (always the same verdict: 0.50)" in table.lines()


@pytest.mark.parametrize(
    ("sampling", "max_tokens", "asked"),
    [
        ({}, 8, {"max_tokens": 8}),
        ({"temperature": 0.0}, 500, {"max_tokens": 500, "temperature": 0.0}),
        ({"max_completion_tokens": 2000}, 8, {"max_completion_tokens": 2000}),
        ({"max_tokens": 3}, 8, {"max_tokens": 3}),
        ({}, None, {}),
    ],
)
async def test_a_verdict_has_one_limit_and_requests_wait_for_their_turn(
    sampling: dict[str, Any], max_tokens: int | None, asked: dict[str, Any]
) -> None:
    running, most, seen = 0, 0, []

    async def create(model: str, messages: list[dict[str, str]], **given: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        seen.append(given)
        await asyncio.sleep(0)  # the others' turn
        running -= 1
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="yes"))])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    found = await measure(RubricJudge(client, "m", sampling, max_tokens, max_concurrent=3), read_cases(CASES))
    assert most == 3
    assert len(seen) == len(found.pairs)
    assert all(given == asked for given in seen)


def test_a_file_that_cannot_be_used_is_named_with_its_line(tmp_path: Path) -> None:
    good: dict[str, Any] = {"prompt": [{"role": "user", "content": "?"}], "rubrics": [{"criterion": "c", "points": 1}]}
    for broken, named in (
        ("not json", "Expecting value"),
        (json.dumps([1]), "needs prompt"),
        (json.dumps({**good, "rubrics": [{"criterion": "c", "points": -1}]}), "positive points"),
        (json.dumps({**good, "graded": [{"answer": "a", "met": [True, False]}]}), "1 values in met"),
        (json.dumps({**good, "graded": [{"answer": "a", "met": ["no"]}]}), "1 values in met, true or false"),
        (json.dumps({**good, "rubrics": [{"criterion": "c", "points": float("inf")}]}), "not a finite number"),
    ):
        file = tmp_path / "cases.jsonl"
        file.write_text(f"{json.dumps(good)}\n{broken}\n")
        with pytest.raises(RubricFault, match=f"cases.jsonl:2: .*{named}"):
            read_cases(file)
    good["rubrics"][0]["criterion"] = "one\u2028two"
    file.write_text(json.dumps(good, ensure_ascii=False), encoding="utf-8")
    assert read_cases(file)[0].rubric[0].text == "one\u2028two"


async def test_the_built_in_environment_rewards_what_the_judge_grants() -> None:
    assert built_in_module("rubric") == "prime_rl.environments.judging.rubric"
    env = load_environment(str(CASES), judge_that(person()), "m", num_eval=3)
    assert (len(env.get_dataset()), len(env.get_eval_dataset())) == (5, 3)
    case = read_cases(CASES)[0]
    row = env.get_dataset()[0]
    state: Any = {
        "prompt": row["prompt"],
        "info": row["info"],
        "answer": "",
        "task": "",
        "timing": {},
        "trajectory": [],
    }
    state["completion"] = [{"role": "assistant", "content": f"<think>Hm.</think>{case.graded[2].text}"}]
    await env.rubric.score_rollout(state)
    assert state["reward"] == pytest.approx(5 / 12)
    metrics = {name: state["metrics"][name] for name in ("criteria_met", "unclear_verdicts")}
    assert metrics == {"criteria_met": 0.25, "unclear_verdicts": 0.0}
