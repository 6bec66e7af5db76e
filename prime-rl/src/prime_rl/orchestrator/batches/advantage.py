"""Computes the advantage of each rollout from the rewards of its group or batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from prime_rl.configs.algorithms import (
    AdvantageConfig,
    CustomAdvantageConfig,
    NormalizedAdvantageConfig,
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


WeightsOf = Callable[[str], Mapping[str, float]]
"""Weights of an environment's reward functions, by name."""


def setup_advantage(config: AdvantageConfig | None, weights_of: WeightsOf = lambda env: {}) -> AdvantageFunction:
    """Return the configured advantage function. Without a config, the advantages are the rewards.

    Raises:
        OrchestratorError: a custom function cannot be imported.
    """
    if config is None:
        return raw_rewards
    if isinstance(config, CustomAdvantageConfig):
        return partial(_call_custom, _custom_function(config.import_path), config.kwargs)
    if isinstance(config, NormalizedAdvantageConfig):
        return partial(normalized, config=config, weights_of=weights_of)
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


def normalized(
    groups: Sequence[Group], config: NormalizedAdvantageConfig, weights_of: WeightsOf = lambda env: {}
) -> list[list[float]]:
    """Advantage (r - baseline) / scale of each rollout.

    - GRPO (Shao et al. 2024): mean and standard deviation of the group.
    - Dr. GRPO (Liu et al. 2025): mean of the group, no scale.
    - RLOO (Ahmadian et al. 2024): mean of the other rollouts in the group, no scale.
    - REINFORCE++ (Hu et al. 2025): mean and standard deviation of the batch.
    - Lite PPO (Liu et al. 2025): mean of the group, standard deviation of the batch.
    - MaxRL (Tajwar et al. 2026): mean of the group as both, so that a group counts by 1 / its success rate.
    - GDPO (Liu et al. 2026): as GRPO for each of several rewards; their weighted sum A is then (A - mean) / scale of
      the batch (`whiten`).

    A standard deviation is that of the sample, sqrt(sum((r - mean)^2) / (n - 1)) + 1e-5, where r and mean are those of
    the group or of the batch, whatever the baseline is. So do `scale_rewards = "group" | "batch" | "none"` of
    `GRPOTrainer` in TRL 1.16, which adds 1e-4 to it. If the n rewards are equal, or n is 1, the scale is 1: with a
    baseline other than the group's, dividing by 1e-5 would make advantages of 100,000.
    """
    if config.rewards == "sum":
        advantages = _centred_and_scaled([shaped_rewards(group, config) for group in groups], config)
    else:
        advantages = [_of_each_reward(group, weights_of(group.example.env), config) for group in groups]
    if not config.whiten:
        return advantages
    in_batch = [value for group in advantages for value in group]
    mean, scale = _mean(in_batch), _scale(in_batch)
    return [[(value - mean) / scale for value in group] for group in advantages]


def _centred_and_scaled(rewards: list[list[float]], config: NormalizedAdvantageConfig) -> list[list[float]]:
    in_batch = [reward for group in rewards for reward in group]
    batch_mean, batch_scale = _mean(in_batch), _scale(in_batch)
    advantages = []
    for group in rewards:
        own_mean = _mean(group)
        mean = {"none": 0.0, "batch": batch_mean}.get(config.baseline, own_mean)
        centred = [reward - mean for reward in group]
        scale = {"none": 1.0, "batch": batch_scale}.get(config.scale, _scale(group))
        if config.scale == "group_mean":
            scale = own_mean if own_mean > 0 else math.inf  # no rollout succeeded, so none is to be imitated
        if config.baseline == "leave_one_out":
            # r_i - (sum - r_i) / (n - 1) = (r_i - mean) * n / (n - 1)
            centred = [value * len(group) / max(len(group) - 1, 1) for value in centred]
        advantages.append([value / scale for value in centred])
    return advantages


def _of_each_reward(group: Group, weights: Mapping[str, float], config: NormalizedAdvantageConfig) -> list[float]:
    """The weighted sum of a group's advantages by each reward function. An agent has one reward, without a name.

    A rollout that ended with an error before it was scored has the value 0.
    """
    values = {
        name: [(rollout.metrics or {}).get(name, 0.0) for rollout in group.rollouts]
        for name, weight in weights.items()
        if weight
    }
    if not values:
        return _centred_and_scaled([[rollout.reward for rollout in group.rollouts]], config)[0]
    advantages = [0.0] * len(group.rollouts)
    for name, rewards in values.items():
        (own,) = _centred_and_scaled([rewards], config)
        advantages = [total + weights[name] * value for total, value in zip(advantages, own, strict=True)]
    return advantages


def shaped_rewards(group: Group, config: NormalizedAdvantageConfig) -> list[float]:
    """The rewards of a group with the terms for length, then clip((r + bias) * scaling, -clip, clip), as AReaL's."""
    bound = math.inf if config.reward_clip is None else config.reward_clip
    shifted = ((each + config.reward_bias) * config.reward_scaling for each in _with_lengths(group, config))
    return [min(max(each, -bound), bound) for each in shifted]


def _with_lengths(group: Group, config: NormalizedAdvantageConfig) -> list[float]:
    """The rewards of a group with the terms for length that the config adds.

    - Soft overlong punishment (Yu et al. 2025, DAPO): -penalty * min(1, max(0, (L - (M - K)) / K)), where L is the
      number of sampled tokens of the longest completion, M is `max_tokens` and K is `buffer_tokens`.
    - `group` (Kimi Team 2025, Kimi k1.5): with s = 0.5 - (L - shortest) / (longest - shortest) over the lengths of the
      group, weight * s for a correct answer and weight * min(0, s) for another; 0 if all lengths are equal.
    - `target` (Aggarwal and Welleck 2025, L1: LCPO-Exact): -weight * |L - target|.
    """
    rewards = [rollout.reward for rollout in group.rollouts]
    if config.overlong is not None:
        limit, buffer = config.overlong.max_tokens, config.overlong.buffer_tokens
        for at, rollout in enumerate(group.rollouts):
            longest = max(
                (len(call.completion_ids) for call in rollout.trace.calls), default=rollout.usage_output_tokens
            )
            excess = (longest - (limit - buffer)) / buffer
            rewards[at] -= config.overlong.penalty * min(1.0, max(0.0, excess))
    rule = config.length
    if rule is None:
        return rewards
    lengths = [sum(len(call.completion_ids) for call in each.trace.calls) for each in group.rollouts]
    if rule.kind == "target":
        assert rule.target_tokens is not None, "checked by the config"
        return [
            reward - rule.weight * abs(length - rule.target_tokens)
            for reward, length in zip(rewards, lengths, strict=True)
        ]
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    shares = [0.5 - (length - shortest) / spread if spread else 0.0 for length in lengths]
    is_correct = [rollout.reward >= rule.correct_reward for rollout in group.rollouts]
    return [
        reward + rule.weight * (share if correct else min(0.0, share))
        for reward, share, correct in zip(rewards, shares, is_correct, strict=True)
    ]


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
