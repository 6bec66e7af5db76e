"""Normalised advantages have the reference's values, and long answers lose reward before they are cut off."""

from __future__ import annotations

import statistics
from itertools import chain

import pytest

from prime_rl.configs.orchestrator import NormalizedAdvantageConfig, OverlongConfig
from prime_rl.orchestrator.batches.advantage import assign_advantages, setup_advantage, shaped_rewards
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
        ("group", "batch", [1.08010, -1.08010, -1.08010, 1.08010, 0, 0, 0, 0]),
        ("batch", "batch", [0.54005, -1.62015, -1.62015, 0.54005, 0.54005, 0.54005, 0.54005, 0.54005]),
        ("none", "none", [1, 0, 0, 1, 1, 1, 1, 1]),
    ],
)
def test_advantages_of_the_reference_rewards(advantages, baseline, scale, expected) -> None:
    assert advantages(baseline=baseline, scale=scale) == pytest.approx(expected, abs=2e-5)


# Advantages by the lines of `GRPOTrainer` in TRL 1.16 (`scale_rewards`), run on these rewards; it adds 1e-4, not 1e-5.
TRL_REWARDS = [[0.2, 0.9, 0.4], [1.0, 0.1, 0.35], [0.5, 0.5, 0.5]]
TRL_ADVANTAGES = {
    "group": [[-0.83182, 1.109093, -0.277273], [1.111879, -0.824943, -0.286937], [0, 0, 0]],
    "batch": [[-1.01952, 1.35936, -0.33984], [1.75584, -1.30272, -0.45312], [0, 0, 0]],
    "none": [[-0.3, 0.4, -0.1], [0.516667, -0.383333, -0.133333], [0, 0, 0]],
}


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_scales_are_those_of_trl(rollout, scale) -> None:
    groups = [Group([rollout(reward=reward) for reward in rewards]) for rewards in TRL_REWARDS]
    assign_advantages(groups, setup_advantage(NormalizedAdvantageConfig(scale=scale)))
    for group, expected in zip(groups, TRL_ADVANTAGES[scale], strict=True):
        assert [each.advantage for each in group.rollouts] == pytest.approx(expected, rel=5e-4, abs=1e-6)


BASELINES = {
    "group": lambda rewards, row, i: statistics.mean(row),
    "leave_one_out": lambda rewards, row, i: statistics.mean(row[:i] + row[i + 1 :]),
    "batch": lambda rewards, row, i: statistics.mean(chain(*rewards)),
    "none": lambda rewards, row, i: 0.0,
}
SCALES = {
    "group": lambda rewards, row: statistics.stdev(row) + 1e-5,
    "batch": lambda rewards, row: statistics.stdev(chain(*rewards)) + 1e-5,
    "none": lambda rewards, row: 1.0,
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", BASELINES)
def test_the_scale_is_the_standard_deviation_with_every_baseline(rollout, baseline, scale) -> None:
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.3, 0.9, 1.0, 0.2], [0.0, 0.0, 0.0, 1.0]]
    groups = [Group([rollout(reward=reward) for reward in row]) for row in rewards]
    assign_advantages(groups, setup_advantage(NormalizedAdvantageConfig(baseline=baseline, scale=scale)))
    for group, row in zip(groups, rewards, strict=True):
        expected = [
            (reward - BASELINES[baseline](rewards, row, i)) / SCALES[scale](rewards, row)
            for i, reward in enumerate(row)
        ]
        assert [each.advantage for each in group.rollouts] == pytest.approx(expected)


@pytest.mark.parametrize(("baseline", "expected"), [("none", 1.0), ("batch", 0.25)])
def test_equal_rewards_are_not_divided_by_almost_nothing(rollout, baseline, expected) -> None:
    groups = [Group([rollout(reward=reward) for reward in row]) for row in ([1.0, 1.0], [1.0, 0.0])]
    assign_advantages(groups, setup_advantage(NormalizedAdvantageConfig(baseline=baseline, scale="group")))
    assert groups[0].rollouts[0].advantage == pytest.approx(expected)


def test_equal_rewards_that_are_no_round_numbers_teach_nothing(rollout) -> None:
    groups = [Group([rollout(reward=0.1) for _ in range(3)])]
    assign_advantages(groups, setup_advantage(NormalizedAdvantageConfig()))
    assert [each.advantage for each in groups[0].rollouts] == pytest.approx([0, 0, 0], abs=1e-9)


@pytest.mark.parametrize(("length", "reward"), [(3000, 1.0), (3840, 0.5), (4096, 0.0), (9000, 0.0)])
def test_the_overlong_penalty_has_the_reference_values(turn, rollout, length, reward) -> None:
    overlong = OverlongConfig(max_tokens=4096, buffer_tokens=512)
    long = rollout(turn([0], [1]), turn([0], list(range(length))), reward=1.0)
    config = NormalizedAdvantageConfig(overlong=overlong)
    assert shaped_rewards(Group([long]), config) == pytest.approx([reward])


def test_rewards_are_shifted_scaled_and_clipped_as_in_areal(turn, rollout) -> None:
    """After the overlong penalty, which takes the last reward to 0.5."""
    lengths = {1.0: 1, 0.7: 1, 0.0: 1, 1.5: 8}
    group = Group([rollout(turn([0], list(range(length))), reward=reward) for reward, length in lengths.items()])
    overlong = OverlongConfig(max_tokens=8, buffer_tokens=4)
    config = NormalizedAdvantageConfig(overlong=overlong, reward_bias=-0.5, reward_scaling=10, reward_clip=4)
    assert shaped_rewards(group, config) == pytest.approx([4, 2, -4, 0])


def test_the_penalty_moves_the_advantage_and_not_the_reward(turn, rollout) -> None:
    short, long = rollout(turn([0], [1, 2]), reward=1.0), rollout(turn([0], list(range(10))), reward=1.0)
    overlong = OverlongConfig(max_tokens=10, buffer_tokens=4)
    config = NormalizedAdvantageConfig(scale="none", overlong=overlong)
    assign_advantages([Group([short, long])], setup_advantage(config))
    assert (short.advantage, long.advantage) == (0.5, -0.5)
    assert long.reward == 1.0


def test_length_terms_are_those_of_the_papers(turn, rollout) -> None:
    """Kimi k1.5 in the group, and L1's exact target. Lengths 2, 4 and 6; the last answer is wrong."""
    answers = ((2, 1.0), (4, 1.0), (6, 0.0))
    group = Group([rollout(turn([0], [1] * length), reward=reward) for length, reward in answers])
    in_group = NormalizedAdvantageConfig(length={"kind": "group", "weight": 0.2})
    assert shaped_rewards(group, in_group) == pytest.approx([1.1, 1.0, -0.1])
    wrong = Group([rollout(turn([0], [1] * length), reward=0.0) for length in (2, 6)])
    assert shaped_rewards(wrong, in_group) == pytest.approx([0.0, -0.1])
    equal = Group([rollout(turn([0], [1, 2]), reward=1.0) for _ in range(2)])
    assert shaped_rewards(equal, in_group) == [1.0, 1.0]
    target = NormalizedAdvantageConfig(length={"kind": "target", "weight": 0.01, "target_tokens": 5})
    assert shaped_rewards(group, target) == pytest.approx([0.97, 0.99, -0.01])


def test_maxrl_divides_by_the_success_rate_and_leaves_failures_alone(rollout) -> None:
    groups = [Group([rollout(reward=reward) for reward in row]) for row in ([1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0])]
    assign_advantages(groups, setup_advantage(NormalizedAdvantageConfig(scale="group_mean")))
    found = [[each.advantage for each in group.rollouts] for group in groups]
    third = 1 / 3
    expected = [[3, -1, -1, -1], [third, third, third, -1], [0, 0, 0, 0]]
    assert found == [pytest.approx(row) for row in expected]


def test_gdpo_normalises_each_reward_in_its_group_and_the_sum_in_the_batch(rollout) -> None:
    """Rewards of one scale cannot drown those of another; recomputed here from the paper."""
    measured = {"correct": [[1, 0, 1], [0, 0, 1]], "short": [[10.0, 40.0, 25.0], [5.0, 80.0, 80.0]]}
    weights = {"correct": 1.0, "short": 0.5}
    groups = [
        Group([rollout(metrics={name: float(values[g][i]) for name, values in measured.items()}) for i in range(3)])
        for g in range(2)
    ]
    config = NormalizedAdvantageConfig(rewards="each", whiten=True)
    assign_advantages(groups, setup_advantage(config, weights_of=lambda env: weights | {"only_measured": 0.0}))

    def in_group(row: list[float]) -> list[float]:
        return [(value - statistics.mean(row)) / (statistics.stdev(row) + 1e-5) for value in row]

    parts = {name: [in_group(row) for row in rows] for name, rows in measured.items()}
    sums = [sum(weights[name] * parts[name][g][i] for name in weights) for g in range(2) for i in range(3)]
    expected = [(value - statistics.mean(sums)) / (statistics.stdev(sums) + 1e-5) for value in sums]
    assert [each.advantage for group in groups for each in group.rollouts] == pytest.approx(expected)
