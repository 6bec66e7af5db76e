"""The environment `rows`: single-turn questions from files, with rewards by name.

[[orchestrator.env]]
id = "rows"
args = { datasets = [{ path = "questions.jsonl" }], rewards = ["math"] }
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import verifiers as vf
from datasets import Dataset
from pydantic import ValidationError

from prime_rl.environments.rewards.building import PooledRubric, Rewards, build, timeouts_of
from prime_rl.environments.rewards.registry import RewardFault, RewardSpec
from prime_rl.environments.rows.arguments import read_rows_config
from prime_rl.environments.rows.loading import Problem, load_problems
from prime_rl.environments.rows.sources import RowsFault
from prime_rl.utils.conversations import has_image

Function = Callable[..., Awaitable[float]]
_NOT_PASSED_ON = frozenset(
    {"prompt", "messages", "conversations", "answer", "images", "image", "tool_defs", "oai_tools"}
)
"""Columns that are part of prompt or answer, or that verifiers would interpret."""


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
    """Problems as the dataset of a verifiers environment. `info` is JSON, so that rows may have different columns."""
    prompts = [problem.prompt for problem in problems]
    if any(map(has_image, prompts)):
        # A column of Arrow holds texts or lists, not both: system messages and rows without images become parts too.
        prompts = [[_in_parts(message) for message in prompt] for prompt in prompts]
    return Dataset.from_dict(
        {
            "prompt": prompts,
            "answer": [problem.answer for problem in problems],
            "prompt_id": [problem.id for problem in problems],
            "info": [json.dumps(_info(problem), ensure_ascii=False, default=str) for problem in problems],
        }
    )


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _info(problem: Problem) -> dict[str, Any]:
    """Values for reward functions: the columns of the source, and those that its format derives."""
    columns = {name: value for name, value in problem.row.items() if name not in _NOT_PASSED_ON}
    return {
        **columns,
        **problem.extra,
        # verifiers' form of a tool. It requires description and parameters.
        **({"tool_defs": _tools(problem)} if problem.tools else {}),
        "prompt_id": problem.id,
        "dataset": problem.extra.get("dataset", problem.dataset),
        "reward_names": [reward.metric for reward in problem.rewards],
    }


def _tools(problem: Problem) -> list[dict[str, Any]]:
    """The tools of a row as verifiers has them, without the object `function` around each."""
    tools = []
    for schema in problem.tools:
        function = schema["function"] if isinstance(schema.get("function"), Mapping) else schema
        tool = {"description": "", "parameters": {}} | {k: v for k, v in function.items() if v is not None}
        try:
            vf.Tool.model_validate(tool)
        except ValidationError as error:
            (fault, *_) = error.errors()
            place = ".".join(map(str, fault["loc"]))
            raise RowsFault(f"{problem.dataset}: a tool of the prompt {problem.id}: {place}: {fault['msg']}") from error
        tools.append(tool)
    return tools


def rubric_of(problems: Sequence[Problem]) -> vf.Rubric:
    """Make the rubric of all rows.

    Raises:
        RewardFault: a function cannot be used, or two different ones have the same name.
    """
    specs: dict[str, RewardSpec] = {}
    for problem in problems:
        for spec in problem.rewards:
            if specs.setdefault(spec.metric, spec) != spec:
                raise RewardFault(
                    f"datasets use the reward {spec.metric!r} with different settings: give one of the two a "
                    "`name`, so that their metrics differ"
                )
    return RowsRubric(build(list(specs.values())))


class RowsRubric(PooledRubric):
    """Reward functions that score only the rows that name them. Other rows do not get their metrics."""

    def __init__(self, rewards: Rewards) -> None:
        super().__init__(rewards)
        self.names = frozenset(part.name for part in rewards.parts)
        functions = [function for function, _ in rewards.functions()]
        self.funcs = [_for_rows(each) if each.__name__ in self.names else each for each in functions]

    async def score_group(self, states: list[vf.State]) -> None:
        """Score rollouts, and remove the metrics of functions that do not belong to their rows."""
        await super().score_group(states)
        for state in states:
            self._forget_others(state)

    async def score_rollout(self, state: vf.State) -> None:
        """Score one rollout in the same way."""
        await super().score_rollout(state)
        self._forget_others(state)

    def _forget_others(self, state: vf.State) -> None:
        for name in self.names.difference(_names(state)):
            state["metrics"].pop(name, None)
            state["metrics"].pop(timeouts_of(name), None)


def _for_rows(function: Function) -> Function:
    async def reward(state: Any, **objects: Any) -> float:
        return await function(state=state, **objects) if function.__name__ in _names(state) else 0.0

    reward.__name__ = reward.__qualname__ = function.__name__
    return reward


def _names(state: Mapping[str, Any]) -> list[str]:
    """Names of the reward functions of a row."""
    info = state.get("info")
    names = info.get("reward_names") if isinstance(info, Mapping) else None
    return names if isinstance(names, list) else []
