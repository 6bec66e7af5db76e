"""Where every score is 0, one line says what the replies lack, or which reward fits them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl.environments.rewards.fitting import Reply, why_all_zero
from prime_rl.orchestrator.env_checks.dataset_check import answer_of
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.orchestrator.scores import zero_line


def reply(text: str, answer: Any = "A", is_truncated: bool = False, **columns: Any) -> Reply:
    return Reply(text, {"answer": answer, **columns}, is_truncated)


@pytest.mark.parametrize(
    ("replies", "used", "expected"),
    [
        (
            [reply("A. hypertension"), reply("(B) asthma", "B"), reply("no idea")],
            "exact_match",
            "multiple_choice reads a letter and would score 2 of 3 as right, while exact_match compares the whole "
            "reply with the answer: use rewards = [\"multiple_choice\"]; for example, the answer 'A'",
        ),
        ([reply("about 5 mg", "5 mg"), reply("5500 mg", "5.5 g")], "exact_match", 'use rewards = ["numeric"]'),
        ([reply("aspirin", choices=["aspirin", "none"])], "exact_match", 'use rewards = ["multiple_choice"]'),
        ([reply("5 mg", "50 mg")], "numeric", "no answer is right or in the form that numeric (reads the last number"),
        ([reply("x", is_truncated=True), reply("y", is_truncated=True)], "math", "2 of 2 replies were cut off"),
        ([reply("<think> so"), reply("<think> and")], "math", "2 of 2 replies never end their thinking (no </think>)"),
        ([reply(""), reply("")], "math", "2 of 2 replies are empty"),
        ([reply("x", None)], "ifeval", "the rows have no column ground_truth or instruction_id_list"),
        ([reply("x", "y")], "mine", "1 replies have <answer>…</answer>, 0 have \\boxed{…}; the first: the answer 'y'"),
    ],
)  # fmt: skip
def test_the_reason_is_named(replies: list[Reply], used: str, expected: str) -> None:
    line = why_all_zero(replies, [used])
    assert line.startswith(f"all {len(replies)} scores are 0: ")
    assert expected in line


def test_the_right_answer_that_env_check_tries_is_the_first_accepted_one() -> None:
    assert [answer_of({"answer": each}) for each in ('["Paris", "x"]', ["Rome"], "a", None)] == [
        "Paris",
        "Rome",
        "a",
        "",
    ]


def test_only_scores_that_are_all_0_are_explained() -> None:
    rows = [{"answer": "B", "info": json.dumps({"choices": ["aspirin", "ibuprofen"]})}]
    environment: Any = SimpleNamespace(
        num_rows=1, content=lambda row: rows[row], reward_functions={"exact_match": 1.0, "length": 0.0}
    )
    rollouts = [
        Rollout(ExampleRef("a", 0), 0.0, [], 1.0, 0, completion=[{"role": "assistant", "content": text}])
        for text in ("B. aspirin", "I would give ibuprofen.")
    ]
    line = zero_line(rollouts, environment)
    assert line is not None
    assert "multiple_choice reads a letter and would score 2 of 2 as right, while exact_match compares" in line
    rollouts[0].reward = 1.0
    assert zero_line(rollouts, environment) is None
    assert zero_line([], environment) is None
