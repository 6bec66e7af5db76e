"""Chooses the groups of a step that are kept on disk."""

from __future__ import annotations

import random
from collections.abc import Sequence

from prime_rl.orchestrator.rollouts.rollout import Group

RANDOM, WORST, BEST = "random", "worst", "best"
"""Why a group is kept. Those chosen at random are an unbiased sample of the step's groups."""


def choose_groups(groups: Sequence[Group], max_rollouts: int, step: int) -> dict[int, list[str]]:
    """The reasons to keep a group, by the index of each that is kept.

    One group at random in any case; then the worst and the best by mean reward, as far as `max_rollouts` allows; the
    rest at random. How many are chosen at random does not depend on rewards. A group may have several reasons.
    """
    if not groups:
        return {}
    room = max_rollouts // max(len(group.rollouts) for group in groups)
    extremes = min(2, max(0, room - 1))
    # A separate generator, so that keeping rollouts does not change which examples are drawn.
    generator = random.Random(f"kept rollouts of step {step}")
    reasons: dict[int, list[str]] = {
        index: [RANDOM] for index in generator.sample(range(len(groups)), min(len(groups), max(1, room - extremes)))
    }
    by_reward = sorted(range(len(groups)), key=lambda index: groups[index].mean_reward)
    for index, reason in ((by_reward[0], WORST), (by_reward[-1], BEST))[:extremes]:
        reasons.setdefault(index, []).append(reason)
    return dict(sorted(reasons.items()))
