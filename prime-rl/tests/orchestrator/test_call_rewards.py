"""Rewards of single calls: from the rollout to the advantage of each token that the trainer gets."""

from __future__ import annotations

import statistics

import pytest

from prime_rl.configs.algorithms import DefaultAdvantageConfig, NormalizedAdvantageConfig
from prime_rl.orchestrator.batches.advantage import assign_advantages, setup_advantage
from prime_rl.orchestrator.rollouts.rollout import Group, to_samples
from prime_rl.trainer.rl.batches import row_from_sample


@pytest.fixture
def group(turn, rollout) -> Group:
    """Two turns worth 0.5 and 1, one turn worth 0, and a rejected rollout."""
    two = rollout(turn([1], [2, 3]), turn([1, 2, 3, 9], [4]), reward=1.0, call_rewards=[0.5, 1.0])
    one = rollout(turn([1], [5]), reward=0.0)
    return Group([two, one, rollout(turn([1], [6]), reward=77.0, is_rejected=True)])


def test_a_call_is_compared_with_all_calls_of_its_group(group) -> None:
    assign_advantages([group], setup_advantage(DefaultAdvantageConfig()))
    two, one, rejected = group.rollouts
    assert two.call_advantages == pytest.approx([0.0, 0.5])
    assert (two.advantage, one.advantage, rejected.advantage) == pytest.approx((0.25, -0.5, 0.0))


def test_the_scale_is_the_deviation_of_the_calls(group) -> None:
    config = NormalizedAdvantageConfig(type="normalized", baseline="group", scale="group")
    assign_advantages([group], setup_advantage(config))
    rewards = [0.5, 1.0, 0.0]
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    reference = [(reward - mean) / (deviation + 1e-5) for reward in rewards]
    assert [*group.rollouts[0].call_advantages, group.rollouts[1].advantage] == pytest.approx(reference)


def test_each_token_reaches_the_trainer_with_the_advantage_of_its_call(group) -> None:
    assign_advantages([group], setup_advantage(DefaultAdvantageConfig()))
    (sample,) = to_samples(group.rollouts[0])
    row = row_from_sample(sample, seq_len=16)
    trained = [value for value, is_trained in zip(row.advantages, row.loss_mask, strict=True) if is_trained]
    assert row.input_ids == [1, 2, 3, 9, 4]
    assert trained == pytest.approx([0.0, 0.0, 0.5])
    assert to_samples(group.rollouts[2])[0].completion_mask == [False]


def test_separate_calls_are_samples_with_their_own_advantages(group) -> None:
    assign_advantages([group], setup_advantage(DefaultAdvantageConfig()))
    group.rollouts[0].separate_calls = True
    rows = [row_from_sample(sample, seq_len=16) for sample in to_samples(group.rollouts[0])]
    assert [row.input_ids for row in rows] == [[1, 2, 3], [1, 2, 3, 9, 4]]
    assert [row.advantages[-1] for row in rows] == pytest.approx([0.0, 0.5])


def test_without_rewards_of_calls_nothing_changes(turn, rollout) -> None:
    rollouts = [rollout(turn([1], [2]), turn([1, 2], [3]), reward=1.0), rollout(turn([1], [2]), reward=0.0)]
    assign_advantages([Group(rollouts)], setup_advantage(DefaultAdvantageConfig()))
    assert [(each.advantage, each.call_advantages) for each in rollouts] == [(0.5, None), (-0.5, None)]
    assert to_samples(rollouts[0])[0].completion_advantages is None
