"""Scores each row with the reward functions of its dataset."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import verifiers as vf

from prime_rl.environments.rewards.building import PooledRubric, Rewards, build, timeouts_of
from prime_rl.environments.rewards.registry import RewardFault, RewardSpec
from prime_rl.environments.rows.problems import Problem

Function = Callable[..., Awaitable[float]]


class RowsRubric(PooledRubric):
    """Reward functions that score only the rows that name them. Other rows have no metric of theirs."""

    def __init__(self, rewards: Rewards) -> None:
        super().__init__(rewards)
        self.names = frozenset(part.name for part in rewards.parts)
        functions = [function for function, _ in rewards.functions()]
        self.funcs = [_for_rows(each) if each.__name__ in self.names else each for each in functions]

    async def score_group(self, states: list[vf.State]) -> None:
        """Score rollouts, and forget what functions of other rows made of them."""
        await super().score_group(states)
        for state in states:
            self._forget_others(state)

    async def score_rollout(self, state: vf.State) -> None:
        """Score one rollout likewise."""
        await super().score_rollout(state)
        self._forget_others(state)

    def _forget_others(self, state: vf.State) -> None:
        for name in self.names.difference(_names(state)):
            state["metrics"].pop(name, None)
            state["metrics"].pop(timeouts_of(name), None)


def rubric_of(problems: Sequence[Problem]) -> vf.Rubric:
    """The rubric of all rows.

    Raises:
        RewardFault: a function cannot be used, or two different ones have the same name.
    """
    specs: dict[str, RewardSpec] = {}
    for problem in problems:
        for spec in problem.rewards:
            if specs.setdefault(spec.metric, spec) != spec:
                raise RewardFault(
                    f"datasets use the reward {spec.metric!r} with different settings: give one of them a `name`"
                )
    return RowsRubric(build(list(specs.values())))


def _for_rows(function: Function) -> Function:
    async def reward(state: Any, **objects: Any) -> float:
        return await function(state=state, **objects) if function.__name__ in _names(state) else 0.0

    reward.__name__ = reward.__qualname__ = function.__name__
    return reward


def _names(state: Mapping[str, Any]) -> list[str]:
    """Metrics of the functions that score a row."""
    info = state.get("info")
    names = info.get("reward_names") if isinstance(info, Mapping) else None
    return names if isinstance(names, list) else []
