"""Advantages by normalisation: reward less a baseline, divided by a scale, with DAPO's penalty of overlong answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prime_rl.configs.advantages import NormalizedAdvantageConfig, OverlongConfig
from prime_rl.orchestrator.rollout import Group, Rollout

SCALE_EPS = 1e-5
"""Added to standard deviations, so that a group of equal rewards gives 0, not 0 / 0."""


def normalized(groups: Sequence[Group], config: NormalizedAdvantageConfig) -> list[list[float]]:
    """(r - baseline) / (scale + 1e-5) for each rollout of each group.

    GRPO (Shao et al. 2024) takes mean and standard deviation of the group, Dr. GRPO (Liu et al. 2025) the mean alone,
    RLOO (Ahmadian et al. 2024) the mean of the others, REINFORCE++ (Hu et al. 2025) mean and standard deviation of the
    batch. The scale is the square root of the sum of (r - baseline)^2 over n - 1 rollouts of the group or batch; the
    leave-one-out baseline is no mean of its own group, and is scaled as the mean would be.
    """
    rewards = [[shaped_reward(rollout, config.overlong) for rollout in group.rollouts] for group in groups]
    everything = [reward for group in rewards for reward in group]
    batch_mean = _mean(everything)
    means = [{"none": 0.0, "batch": batch_mean}.get(config.baseline, _mean(group)) for group in rewards]
    batch_scale = _deviation([r - mean for group, mean in zip(rewards, means, strict=True) for r in group])
    advantages = []
    for group, mean in zip(rewards, means, strict=True):
        centred = [reward - mean for reward in group]
        scale = {"none": 1.0, "batch": batch_scale + SCALE_EPS}.get(config.scale, _deviation(centred) + SCALE_EPS)
        if config.baseline == "leave_one_out":
            # r_i - (sum - r_i) / (n - 1) = (r_i - mean) * n / (n - 1)
            centred = [value * len(group) / max(len(group) - 1, 1) for value in centred]
        advantages.append([value / scale for value in centred])
    return advantages


def shaped_reward(rollout: Rollout, overlong: OverlongConfig | None) -> float:
    """The reward, less the overlong penalty of the rollout's longest answer.

    Soft overlong punishment (Yu et al. 2025, DAPO): with L tokens sampled, limit M and buffer K, the penalty is
    min(1, max(0, (L - (M - K)) / K)) times its size.
    """
    if overlong is None:
        return rollout.reward
    longest = max((len(turn.completion_ids) for turn in rollout.turns), default=rollout.usage_output_tokens)
    excess = (longest - (overlong.max_tokens - overlong.buffer_tokens)) / overlong.buffer_tokens
    return rollout.reward - overlong.penalty * min(1.0, max(0.0, excess))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _deviation(centred: Sequence[float]) -> float:
    """Sample standard deviation; 1 for a single value, which has none."""
    if len(centred) < 2:
        return 1.0
    return math.sqrt(math.fsum(value * value for value in centred) / (len(centred) - 1))
