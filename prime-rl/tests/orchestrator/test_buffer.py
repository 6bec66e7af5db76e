from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest

from prime_rl.configs.orchestrator import BufferConfig, EnvConfig, OrchestratorConfig
from prime_rl.orchestrator.reports.reporter import reward_metrics
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Group
from prime_rl.orchestrator.scheduling.buffer import Buffer

ROWS = {"a": 30, "b": 10}


def draws(buffer: Buffer, count: int) -> list[ExampleRef]:
    return [buffer.sample() for _ in range(count)]


def test_the_same_seed_draws_the_same_examples() -> None:
    first, again = (Buffer(ROWS, BufferConfig(), seed=7) for _ in range(2))
    assert draws(first, 50) == draws(again, 50)
    assert draws(Buffer(ROWS, BufferConfig(), seed=8), 50) != draws(Buffer(ROWS, BufferConfig(), seed=7), 50)


def test_environments_are_drawn_by_size_or_by_ratio() -> None:
    by_size = Counter(example.env for example in draws(Buffer(ROWS, BufferConfig(), seed=0), 2000))
    by_ratio = Counter(
        example.env for example in draws(Buffer(ROWS, BufferConfig(env_ratios=[1.0, 9.0]), seed=0), 2000)
    )
    assert 0.7 < by_size["a"] / 2000 < 0.8
    assert 0.07 < by_ratio["a"] / 2000 < 0.13


def test_every_row_can_be_drawn_and_no_other() -> None:
    assert {example.row for example in draws(Buffer({"a": 5}, BufferConfig(), seed=0), 200)} == set(range(5))


def test_a_restored_buffer_returns_the_examples_in_flight_first_and_continues() -> None:
    buffer = Buffer(ROWS, BufferConfig(), seed=3)
    in_flight = draws(buffer, 4)
    state = json.loads(json.dumps(buffer.state(in_flight)))
    expected = draws(buffer, 6)

    resumed = Buffer(ROWS, BufferConfig(), seed=99)
    resumed.restore(state)
    assert draws(resumed, 10) == in_flight + expected


def test_examples_that_no_longer_exist_are_dropped() -> None:
    state = Buffer(ROWS, BufferConfig(), seed=0).state([ExampleRef("a", 29), ExampleRef("gone", 0), ExampleRef("b", 1)])
    smaller = Buffer({"a": 5, "b": 10}, BufferConfig(), seed=0)
    smaller.restore(state)
    assert smaller.sample() == ExampleRef("b", 1)


def test_online_filtering_rejects_groups_that_are_solved_always_or_never(rollout) -> None:
    buffer = Buffer(ROWS, BufferConfig(online_difficulty_filtering=True), seed=0)
    groups = [Group([rollout(reward=r) for r in rewards]) for rewards in ([1, 1], [0, 0], [0, 0], [1, 0])]
    assert [buffer.accepts(group) for group in groups] == [False, False, False, True]
    metrics = buffer.take_metrics()
    assert (metrics["filtered_rollouts/easy"], metrics["filtered_rollouts/hard"]) == (0.25, 0.5)


def test_a_group_with_different_rewards_is_neither_solved_always_nor_never_whatever_their_mean(rollout) -> None:
    buffer = Buffer(ROWS, BufferConfig(online_difficulty_filtering=True), seed=0)
    groups = [Group([rollout(reward=r) for r in rewards]) for rewards in ([1, -1], [2, 0])]
    assert [buffer.accepts(group) for group in groups] == [True, True]
    assert reward_metrics(groups)["batch/effective_batch_size"] == 1


def test_without_filtering_every_group_is_accepted(rollout) -> None:
    buffer = Buffer(ROWS, BufferConfig(), seed=0)
    assert buffer.accepts(Group([rollout(reward=0.0)]))


def test_groups_of_equal_rewards_are_rejected_whatever_the_rewards(rollout) -> None:
    buffer = Buffer(ROWS, BufferConfig(drop_equal_rewards=True), seed=0)
    groups = [Group([rollout(reward=r) for r in rewards]) for rewards in ([1, 1], [0.3, 0.3], [0, 0], [1, 0])]
    assert [buffer.accepts(group) for group in groups] == [False, False, False, True]
    shares = {"filtered_rollouts/easy": 0.25, "filtered_rollouts/hard": 0.25, "filtered_rollouts/equal": 0.25}
    assert buffer.take_metrics().items() >= shares.items()


def test_in_turn_every_row_comes_once_before_any_comes_again() -> None:
    buffer = Buffer({"a": 5}, BufferConfig(order="sequential"), seed=1)
    assert [example.row for example in draws(buffer, 12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_a_buffer_in_turn_resumes_at_the_row_after_the_last(rollout) -> None:
    config = BufferConfig(order="sequential", easy_threshold=1.0)
    buffer = Buffer(ROWS, config, seed=5)
    in_flight = draws(buffer, 7)
    solved = rollout(reward=1.0)
    solved.example = ExampleRef("a", 12)
    assert buffer.accepts(Group([solved]))
    state = json.loads(json.dumps(buffer.state(in_flight)))
    expected = draws(buffer, 60)
    assert ExampleRef("a", 11) in expected[:20]
    assert ExampleRef("a", 12) not in expected
    for env in ROWS:
        rows = [example.row for example in expected if example.env == env]
        assert all(after > before or after <= 1 for before, after in itertools.pairwise(rows)), rows

    resumed = Buffer(ROWS, config, seed=99)
    resumed.restore(state)
    assert draws(resumed, 67) == in_flight + expected


def test_a_checkpoint_without_positions_begins_at_the_first_row() -> None:
    state = Buffer(ROWS, BufferConfig(), seed=0).state([])
    assert "next_rows" not in state
    buffer = Buffer({"a": 3}, BufferConfig(order="sequential"), seed=0)
    buffer.restore(state)
    assert [example.row for example in draws(buffer, 2)] == [0, 1]


@pytest.mark.parametrize(
    ("datasets", "order"),
    [
        ([{"path": "a.jsonl"}], "random"),
        ([{"path": "a.jsonl", "order": "ids.txt"}], "sequential"),
        ([{"path": "a.jsonl"}, {"path": "b.jsonl"}], "sequential"),
        ("a.jsonl", "random"),
    ],
)
def test_a_curriculum_of_rows_is_followed_unless_the_config_says_otherwise(datasets: object, order: str) -> None:
    env = EnvConfig(id="rows", args={"datasets": datasets})
    assert OrchestratorConfig(env=[env]).buffer.order == order
    assert OrchestratorConfig(env=[env], buffer=BufferConfig(order="random")).buffer.order == "random"
