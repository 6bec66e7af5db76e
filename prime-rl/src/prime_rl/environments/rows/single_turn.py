"""The environment `rows`: single-turn questions from files, with rewards by name.

[[orchestrator.env]]
id = "rows"
args = { datasets = [{ path = "questions.jsonl" }], rewards = ["math"] }
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import verifiers as vf
from datasets import Dataset

from prime_rl.environments.rows.arguments import read_rows_config
from prime_rl.environments.rows.loading import load_problems
from prime_rl.environments.rows.problems import Problem
from prime_rl.environments.rows.scoring import rubric_of

_NOT_PASSED_ON = frozenset({"prompt", "messages", "answer", "images", "image", "tool_defs", "oai_tools"})
"""Columns that are in the prompt or the answer, or that mean something else to verifiers."""


def load_environment(**args: Any) -> vf.Environment:
    """Load the environment. `args` are those of `RowsConfig`.

    Raises:
        ConfigError: the arguments have faults.
        RowsFault: a dataset cannot be used.
        RewardFault: a reward function cannot be used.
    """
    config = read_rows_config(args)
    train = load_problems(config)
    held_out = load_problems(config, of_evaluation=True) if config.eval_datasets else []
    return vf.SingleTurnEnv(
        dataset=table_of(train),
        eval_dataset=table_of(held_out) if held_out else None,
        rubric=rubric_of([*train, *held_out]),
    )


def table_of(problems: Sequence[Problem]) -> Dataset:
    """Problems as verifiers takes them. `info` is JSON, so that rows may hold different things."""
    return Dataset.from_dict(
        {
            "prompt": [problem.prompt for problem in problems],
            "answer": [problem.answer for problem in problems],
            "prompt_id": [problem.id for problem in problems],
            "info": [json.dumps(_info(problem), ensure_ascii=False, default=str) for problem in problems],
        }
    )


def _info(problem: Problem) -> dict[str, Any]:
    """What reward functions may ask for: the columns of the source, and what its format makes of them."""
    columns = {name: value for name, value in problem.row.items() if name not in _NOT_PASSED_ON}
    return {
        **columns,
        **problem.extra,
        "prompt_id": problem.id,
        "dataset": problem.extra.get("dataset", problem.dataset),
        "reward_names": [reward.metric for reward in problem.rewards],
    }
