"""How much better a rollout did than the others of its group."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from prime_rl.configs.advantages import AdvantageConfig, CustomAdvantageConfig, NormalizedAdvantageConfig
from prime_rl.orchestrator.errors import OrchestratorError
from prime_rl.orchestrator.normalization import normalized
from prime_rl.orchestrator.rollout import Group

if TYPE_CHECKING:
    import torch

AdvantageFunction = Callable[[Sequence[Group]], list[list[float]]]
"""From the groups of a batch to one advantage for each rollout of each group."""


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What a custom advantage function receives: P groups of G rollouts."""

    rewards: torch.Tensor
    """float32 [P, G]"""
    completion_lengths: torch.Tensor
    """int64 [P, G]; tokens after the first prompt."""


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    """What a custom advantage function returns."""

    advantages: torch.Tensor
    """[P, G], broadcast to every token of the rollout."""


def setup_advantage(config: AdvantageConfig | None) -> AdvantageFunction:
    """The function that the config asks for; without a config, the rewards themselves.

    Raises:
        OrchestratorError: a custom function does not import.
    """
    if config is None:
        return raw_rewards
    if isinstance(config, CustomAdvantageConfig):
        return partial(_call_custom, _import_function(config.import_path), config.kwargs)
    if isinstance(config, NormalizedAdvantageConfig):
        return partial(normalized, config=config)
    return length_weighted if config.length_weighted_mean else centred


def assign_advantages(groups: Sequence[Group], advantage: AdvantageFunction) -> None:
    """Set the advantage of every rollout."""
    for group, values in zip(groups, advantage(groups), strict=True):
        for rollout, value in zip(group.rollouts, values, strict=True):
            rollout.advantage = float(value)


def raw_rewards(groups: Sequence[Group]) -> list[list[float]]:
    return [[rollout.reward for rollout in group.rollouts] for group in groups]


def centred(groups: Sequence[Group]) -> list[list[float]]:
    """Each reward less the mean of its group; not divided by the standard deviation."""
    return [_less(group, group.mean_reward) for group in groups]


def length_weighted(groups: Sequence[Group]) -> list[list[float]]:
    """Each reward less the group's mean weighted by completion length, so that each token has the same say.

    A group without completion tokens uses the plain mean.
    """
    return [_less(group, _token_mean(group)) for group in groups]


def _less(group: Group, baseline: float) -> list[float]:
    return [rollout.reward - baseline for rollout in group.rollouts]


def _token_mean(group: Group) -> float:
    lengths = [rollout.completion_tokens for rollout in group.rollouts]
    if not sum(lengths):
        return group.mean_reward
    weighted = sum(rollout.reward * length for rollout, length in zip(group.rollouts, lengths, strict=True))
    return weighted / sum(lengths)


def _import_function(import_path: str) -> Callable[..., Any]:
    module_name, _, name = import_path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise OrchestratorError(
            f"orchestrator.advantage.import_path: {import_path!r} does not import: {error}"
        ) from error


def _call_custom(function: Callable[..., Any], kwargs: dict[str, Any], groups: Sequence[Group]) -> list[list[float]]:
    # Torch takes more than a second to import, and only custom functions see tensors.
    import torch

    rewards = torch.tensor([[rollout.reward for rollout in group.rollouts] for group in groups])
    lengths = torch.tensor([[rollout.completion_tokens for rollout in group.rollouts] for group in groups])
    advantages = function(AdvantageInputs(rewards, lengths), **kwargs).advantages
    if tuple(advantages.shape) != tuple(rewards.shape):
        raise OrchestratorError(
            f"the custom advantage function returned the shape {tuple(advantages.shape)}; "
            f"it was given rewards of shape {tuple(rewards.shape)}"
        )
    return advantages.tolist()
