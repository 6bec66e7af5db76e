"""The environment `reasoning-gym`: real tasks, the package's own scorers, ids that stay."""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from prime_rl.checks.packages import built_in_faults
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.environments.adapters.options import read_reasoning_gym_config
from prime_rl.environments.builtin import built_in_module
from prime_rl.utils.errors import UserError
from prime_rl.utils.pydantic_config import ConfigError

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: `uv sync --inexact --extra environments`")

from prime_rl.environments.adapters.procedural import rows_of
from prime_rl.environments.adapters.reasoning_gym import load_environment

MIXTURE: dict[str, Any] = {
    "datasets": [
        {"name": "chain_sum", "weight": 2, "config": {"min_terms": 2, "max_terms": 3}},
        {"name": "rearc"},  # its scorer compares tuples
        {"name": "isomorphic_strings"},  # its rows depend on the order of a set
        {"name": "knights_knaves"},  # its rows hold text of NumPy
    ],
    "size": 24,
    "eval_size": 6,
}


@pytest.fixture(scope="module")
def environment() -> Iterator[Any]:
    environment = load_environment(**MIXTURE)
    yield environment
    asyncio.run(environment.rubric.teardown())


def scores(environment: Any, texts: list[str]) -> list[float]:
    rewards = next(each.rewards for each in environment.rubric.rubrics if hasattr(each, "rewards"))

    async def score() -> list[float]:
        values = []
        for row, text in zip(environment.get_dataset(), texts, strict=True):
            completion = [{"role": "assistant", "content": text}]
            values.append((await rewards.score(row["prompt"], completion, row))["score"])
        return values

    return asyncio.run(score())


def test_the_packages_answers_earn_1_and_others_less(environment: Any) -> None:
    rows = [json.loads(row["info"]) for row in environment.get_dataset()]
    assert {row["gym_task"] for row in rows} == {each["name"] for each in MIXTURE["datasets"]}
    assert sum(row["gym_task"] == "chain_sum" for row in rows) > 4
    answers = [ast.literal_eval(row["entry"])["answer"] for row in rows]
    assert scores(environment, [f"So <answer>{answer}</answer>" for answer in answers]) == [1.0] * len(rows)
    assert max(scores(environment, ["no answer"] * len(rows))) < 0.1
    assert max(scores(environment, [f"<think><answer>{answer}</answer></think>" for answer in answers])) < 0.1


def test_rows_and_their_ids_are_the_same_in_another_load_and_none_is_evaluated(environment: Any) -> None:
    again = load_environment(**MIXTURE)
    asyncio.run(again.rubric.teardown())
    for split in ("get_dataset", "get_eval_dataset"):
        rows, others = getattr(environment, split)(), getattr(again, split)()
        assert list(rows["prompt_id"]) == list(others["prompt_id"])
        assert list(rows["info"]) == list(others["info"])
    held_out = {json.dumps(row["prompt"]) for row in environment.get_eval_dataset()}
    assert held_out
    assert held_out.isdisjoint(json.dumps(row["prompt"]) for row in environment.get_dataset())


def test_an_unknown_task_and_a_refused_config_are_one_line() -> None:
    with pytest.raises(UserError, match=r"^reasoning-gym makes no rows: no task 'chain_sun'; did you mean '"):
        load_environment(task="chain_sun")
    refused = {"datasets": [{"name": "chain_sum", "weight": 1, "config": {"min_terms": 0}}], "task": None}
    with pytest.raises(UserError, match="the config of task 'chain_sum' is not valid"):
        rows_of(refused, 2, 0)


def test_arguments_are_checked_before_anything_is_loaded() -> None:
    env = EnvConfig(id="reasoning-gym", args={"size": 10})
    assert built_in_module(env.id) == "prime_rl.environments.adapters.reasoning_gym"
    (line,) = built_in_faults("orchestrator.env[0]", env, StartDir())
    assert "name one task" in line
    with pytest.raises(ConfigError, match="make the same rows"):
        read_reasoning_gym_config({"task": "gcd", "eval_seed": 1})
