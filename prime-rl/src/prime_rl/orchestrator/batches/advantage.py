"""Computes the advantage of each rollout from the rewards of its group or batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from prime_rl.configs.algorithms import (
    AdvantageConfig,
    CustomAdvantageConfig,
    NormalizedAdvantageConfig,
    OverlongConfig,
)
from prime_rl.orchestrator.errors import OrchestratorError
from prime_rl.orchestrator.rollouts.rollout import Group, Rollout
from prime_rl.orchestrator.rollouts.trace import TokenTrace
from prime_rl.utils.errors import UserError, one_line
from prime_rl.utils.imports import import_function, place_of

if TYPE_CHECKING:
    import torch

    from prime_rl.configs.orchestrator import OrchestratorConfig


AdvantageFunction = Callable[[Sequence[Group]], list[list[float]]]
"""Takes the groups of a batch; returns one list per group with one advantage per rollout."""
SCALE_EPS = 1e-5
"""Added to standard deviations, so that rewards which differ by rounding alone get advantages near 0."""


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """Input of a custom advantage function, for P groups of G rollouts."""

    rewards: torch.Tensor
    """float32 [P, G]"""
    completion_lengths: torch.Tensor
    """int64 [P, G]. Number of sampled tokens, and of tokens that the environment wrote between turns."""


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    """Output of a custom advantage function."""

    advantages: torch.Tensor
    """float [P, G]. All tokens of a rollout get its advantage."""


def setup_advantage(config: AdvantageConfig | None) -> AdvantageFunction:
    """Return the configured advantage function. Without a config, the advantages are the rewards.

    Raises:
        OrchestratorError: a custom function cannot be imported.
    """
    if config is None:
        return raw_rewards
    if isinstance(config, CustomAdvantageConfig):
        return partial(_call_custom, _custom_function(config.import_path), config.kwargs)
    if isinstance(config, NormalizedAdvantageConfig):
        return partial(normalized, config=config)
    return length_weighted if config.length_weighted_mean else centred


def assign_advantages(groups: Sequence[Group], advantage: AdvantageFunction) -> None:
    """Set the advantage of every rollout, and of every call in groups whose calls have their own rewards.

    In such a group, each call is compared with all calls of the group, as if it were a rollout: AReaL treats single
    completions in this way. Rejected rollouts are not compared, and get 0.
    """
    compared = [_compared(group) for group in groups]
    as_groups = [
        Group([member for _, members in pairs for member in members], group.off_policy_level)
        for group, pairs in zip(groups, compared, strict=True)
    ]
    for group, pairs, values in zip(groups, compared, advantage(as_groups), strict=True):
        for rollout in group.rollouts:
            rollout.advantage, rollout.call_advantages = 0.0, None
        left = iter(values)
        for rollout, members in pairs:
            own = [float(next(left)) for _ in members]
            rollout.advantage = _mean(own)
            rollout.call_advantages = None if members[0] is rollout else own


def _compared(group: Group) -> list[tuple[Rollout, list[Rollout]]]:
    """Each rollout that is not rejected, with what is compared: itself, or one rollout for each of its calls."""
    by_call = group.has_call_rewards
    return [(each, _calls_of(each) if by_call else [each]) for each in group.scored]


def _calls_of(rollout: Rollout) -> list[Rollout]:
    """One rollout for each call; the rollout itself if it has no calls."""
    rewards = rollout.call_rewards or [rollout.reward] * len(rollout.trace.calls)
    calls = zip(rollout.trace.calls, rewards, strict=True)
    return [replace(rollout, reward=reward, trace=TokenTrace([call])) for call, reward in calls] or [rollout]


def raw_rewards(groups: Sequence[Group]) -> list[list[float]]:
    return [[rollout.reward for rollout in group.rollouts] for group in groups]


def centred(groups: Sequence[Group]) -> list[list[float]]:
    """Reward minus the mean reward of the group, without division by the standard deviation."""
    return [_subtract(group, group.mean_reward) for group in groups]


def length_weighted(groups: Sequence[Group]) -> list[list[float]]:
    """Reward minus the group's mean reward weighted by completion length, so that each token has equal weight.

    A group without completion tokens uses the unweighted mean.
    """
    return [_subtract(group, _token_mean(group)) for group in groups]


def _subtract(group: Group, baseline: float) -> list[float]:
    return [rollout.reward - baseline for rollout in group.rollouts]


def _token_mean(group: Group) -> float:
    lengths = [rollout.completion_tokens for rollout in group.rollouts]
    if not sum(lengths):
        return group.mean_reward
    weighted = sum(rollout.reward * length for rollout, length in zip(group.rollouts, lengths, strict=True))
    return weighted / sum(lengths)


def normalized(groups: Sequence[Group], config: NormalizedAdvantageConfig) -> list[list[float]]:
    """Advantage (r - baseline) / (scale + 1e-5) of each rollout; a scale of "none" divides by 1.

    - GRPO (Shao et al. 2024): mean and standard deviation of the group.
    - Dr. GRPO (Liu et al. 2025): mean of the group, no scale.
    - RLOO (Ahmadian et al. 2024): mean of the other rollouts in the group, no scale.
    - REINFORCE++ (Hu et al. 2025): mean and standard deviation of the batch.

    The scale is the sample standard deviation of the rewards, sqrt(sum((r - mean)^2) / (n - 1)), where r and mean are
    those of the group or of the batch, whatever the baseline is. So do `scale_rewards = "group" | "batch" | "none"` of
    `GRPOTrainer` in TRL 1.16, which adds 1e-4 to it. If the n rewards are equal, or n is 1, the scale is 1: with a
    baseline other than the group's, dividing by 1e-5 would make advantages of 100,000.
    """
    rewards = [[shaped_reward(rollout, config.overlong) for rollout in group.rollouts] for group in groups]
    in_batch = [reward for group in rewards for reward in group]
    batch_mean, batch_scale = _mean(in_batch), _scale(in_batch)
    advantages = []
    for group in rewards:
        mean = {"none": 0.0, "batch": batch_mean}.get(config.baseline, _mean(group))
        centred = [reward - mean for reward in group]
        scale = {"none": 1.0, "batch": batch_scale}.get(config.scale, _scale(group))
        if config.baseline == "leave_one_out":
            # r_i - (sum - r_i) / (n - 1) = (r_i - mean) * n / (n - 1)
            centred = [value * len(group) / max(len(group) - 1, 1) for value in centred]
        advantages.append([value / scale for value in centred])
    return advantages


def shaped_reward(rollout: Rollout, overlong: OverlongConfig | None) -> float:
    """The reward minus a penalty for the rollout's longest completion; None applies no penalty.

    Soft overlong punishment (Yu et al. 2025, DAPO): penalty * min(1, max(0, (L - (M - K)) / K)), where L is the number
    of sampled tokens, M is `max_tokens` and K is `buffer_tokens`.
    """
    if overlong is None:
        return rollout.reward
    longest = max((len(call.completion_ids) for call in rollout.trace.calls), default=rollout.usage_output_tokens)
    excess = (longest - (overlong.max_tokens - overlong.buffer_tokens)) / overlong.buffer_tokens
    return rollout.reward - overlong.penalty * min(1.0, max(0.0, excess))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _scale(rewards: Sequence[float]) -> float:
    """Sample standard deviation plus `SCALE_EPS`; 1 for equal rewards and for fewer than two."""
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return 1.0
    mean = _mean(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) + SCALE_EPS


def _custom_function(import_path: str) -> Callable[..., Any]:
    try:
        return import_function(import_path)
    except UserError as fault:
        raise OrchestratorError(f"orchestrator.advantage.import_path: {fault}") from fault


def try_advantage(config: OrchestratorConfig) -> None:
    """Call a custom advantage function once on made-up rewards, so that a mistake in it shows before a model is loaded.

    Raises:
        OrchestratorError: it cannot be imported or called, or returns what cannot be trained on.
    """
    custom, group_size = config.advantage, config.rollouts_per_example
    if not isinstance(custom, CustomAdvantageConfig):
        return
    function = _custom_function(custom.import_path)
    key = f"orchestrator.advantage.import_path = {custom.import_path!r}"
    rewards = [[float(at % 2) for at in range(group_size)], [float(at) for at in range(group_size)]]
    # Most runs have groups of equal rewards, whose standard deviation is 0.
    rewards += [] if config.buffer.drop_equal_rewards else [[0.5] * group_size]
    lengths = [[1 + (group + at) % 4 for at in range(group_size)] for group in range(len(rewards))]
    try:
        _advantages(function, custom.kwargs, rewards, lengths)
    except OrchestratorError as fault:
        raise OrchestratorError(f"{key}: called on made-up rewards, {fault}") from fault
    except (Exception, SystemExit) as error:
        shape = f"[{len(rewards)}, {group_size}]"
        raised = f"called on rewards of shape {shape}, it raised {one_line(error)}{place_of(error)}"
        raise OrchestratorError(f"{key}: {raised}") from error


def _call_custom(function: Callable[..., Any], kwargs: dict[str, Any], groups: Sequence[Group]) -> list[list[float]]:
    if len({len(group.rollouts) for group in groups}) > 1:
        raise OrchestratorError(
            "a custom advantage function takes groups of one size; rewards of single calls, and rejected rollouts, "
            "give groups of several"
        )
    rewards = [[rollout.reward for rollout in group.rollouts] for group in groups]
    lengths = [[rollout.completion_tokens for rollout in group.rollouts] for group in groups]
    return _advantages(function, kwargs, rewards, lengths)


def _advantages(
    function: Callable[..., Any], kwargs: dict[str, Any], rewards: list[list[float]], lengths: list[list[int]]
) -> list[list[float]]:
    # Torch takes more than a second to import, and only custom functions use tensors.
    import torch

    given = torch.tensor(rewards)
    # A copy: a function that changes its input in place must not change what it is checked against.
    returned = function(AdvantageInputs(given.clone(), torch.tensor(lengths)), **kwargs)
    advantages = getattr(returned, "advantages", None)
    if not isinstance(advantages, torch.Tensor):
        got = returned if advantages is None else advantages
        raise OrchestratorError(
            f"the custom advantage function returned a {type(got).__name__}, not AdvantageOutputs with a tensor"
        )
    if tuple(advantages.shape) != tuple(given.shape):
        raise OrchestratorError(
            f"the custom advantage function returned advantages of shape {tuple(advantages.shape)} "
            f"for rewards of shape {tuple(given.shape)}"
        )
    for group, own in zip(given, advantages, strict=True):
        if not own.isfinite().all():
            raise OrchestratorError(
                f"the custom advantage function returned {own.tolist()} for a group with the rewards "
                f"{group.tolist()}: advantages are finite numbers; where it divides by a standard deviation, add a "
                "small number to it"
            )
    values: list[list[float]] = advantages.tolist()
    return values
