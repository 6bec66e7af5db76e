"""Normalised advantages have the reference's values, and long answers lose reward before they are cut off."""

from __future__ import annotations

import pytest

from prime_rl.configs.orchestrator import NormalizedAdvantageConfig, OverlongConfig
from prime_rl.orchestrator.batches.advantage import assign_advantages, setup_advantage, shaped_reward
from prime_rl.orchestrator.rollouts.rollout import Group


@pytest.fixture
def advantages(rollout):
    """The advantages of two groups of four, rewards 1, 0, 0, 1 and four times 1."""

    def of(**settings) -> list[float]:
        groups = [Group([rollout(reward=reward) for reward in rewards]) for rewards in ([1, 0, 0, 1], [1, 1, 1, 1])]
        assign_advantages(groups, setup_advantage(NormalizedAdvantageConfig(**settings)))
        return [each.advantage for group in groups for each in group.rollouts]

    return of


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        ("group", "group", [0.86601, -0.86601, -0.86601, 0.86601, 0, 0, 0, 0]),
        ("group", "none", [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0]),
        ("leave_one_out", "none", [0.66667, -0.66667, -0.66667, 0.66667, 0, 0, 0, 0]),
        ("group", "batch", [1.32284, -1.32284, -1.32284, 1.32284, 0, 0, 0, 0]),
        ("batch", "batch", [0.54005, -1.62015, -1.62015, 0.54005, 0.54005, 0.54005, 0.54005, 0.54005]),
        ("none", "none", [1, 0, 0, 1, 1, 1, 1, 1]),
    ],
)
def test_advantages_of_the_reference_rewards(advantages, baseline, scale, expected) -> None:
    assert advantages(baseline=baseline, scale=scale) == pytest.approx(expected, abs=2e-5)


def test_equal_rewards_that_are_no_round_numbers_teach_nothing(rollout) -> None:
    groups = [Group([rollout(reward=0.1) for _ in range(3)])]
    assign_advantages(groups, setup_advantage(NormalizedAdvantageConfig()))
    assert [each.advantage for each in groups[0].rollouts] == pytest.approx([0, 0, 0], abs=1e-9)


@pytest.mark.parametrize(("length", "reward"), [(3000, 1.0), (3840, 0.5), (4096, 0.0), (9000, 0.0)])
def test_the_overlong_penalty_has_the_reference_values(turn, rollout, length, reward) -> None:
    overlong = OverlongConfig(max_tokens=4096, buffer_tokens=512)
    long = rollout(turn([0], [1]), turn([0], list(range(length))), reward=1.0)
    assert shaped_reward(long, overlong) == pytest.approx(reward)


def test_the_penalty_moves_the_advantage_and_not_the_reward(turn, rollout) -> None:
    short, long = rollout(turn([0], [1, 2]), reward=1.0), rollout(turn([0], list(range(10))), reward=1.0)
    overlong = OverlongConfig(max_tokens=10, buffer_tokens=4)
    config = NormalizedAdvantageConfig(scale="none", overlong=overlong)
    assign_advantages([Group([short, long])], setup_advantage(config))
    assert (short.advantage, long.advantage) == (0.5, -0.5)
    assert long.reward == 1.0
