from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.configs.orchestrator import CustomAdvantageConfig, DefaultAdvantageConfig, OrchestratorConfig
from prime_rl.orchestrator.batches.advantage import assign_advantages, setup_advantage, try_advantage
from prime_rl.orchestrator.errors import OrchestratorError
from prime_rl.orchestrator.rollouts.rollout import Group

FUNCTIONS = """
from prime_rl.orchestrator.advantage import AdvantageOutputs

def rank_by_length(inputs, scale):
    return AdvantageOutputs(scale * inputs.rewards * inputs.completion_lengths)

def wrong_shape(inputs):
    return AdvantageOutputs(inputs.rewards[:1])

def bare_tensor(inputs):
    return inputs.rewards

def list_of_numbers(inputs):
    return AdvantageOutputs(inputs.rewards.tolist())

def of_other_names(inputs):
    return AdvantageOutputs(inputs.scores)

def divided_by_nothing(inputs):
    centred = inputs.rewards - inputs.rewards.mean(1, keepdim=True)
    return AdvantageOutputs(centred / inputs.rewards.std(1, keepdim=True))
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a user's module."""
    (tmp_path / "advantages_of_a_user.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return "advantages_of_a_user"


@pytest.fixture
def groups(turn, rollout) -> list[Group]:
    """Rewards 1, 0 with lengths 1, 3; and rewards 0.5, 0.5 with lengths 2, 2."""
    first = [rollout(turn([0], [1]), reward=1.0), rollout(turn([0], [1, 2, 3]), reward=0.0)]
    second = [rollout(turn([0], [1, 2]), reward=0.5) for _ in range(2)]
    return [Group(first), Group(second)]


def advantages(groups: list[Group]) -> list[list[float | None]]:
    return [[rollout.advantage for rollout in group.rollouts] for group in groups]


def test_the_default_is_the_reward_minus_the_group_mean(groups) -> None:
    assign_advantages(groups, setup_advantage(DefaultAdvantageConfig()))
    assert advantages(groups) == [[0.5, -0.5], [0.0, 0.0]]


def test_the_length_weighted_mean_counts_each_token_once(groups) -> None:
    assign_advantages(groups, setup_advantage(DefaultAdvantageConfig(length_weighted_mean=True)))
    assert advantages(groups) == [[0.75, -0.25], [0.0, 0.0]]


def test_lengths_include_the_tokens_that_the_environment_wrote_between_turns(turn, rollout) -> None:
    attempt = rollout(turn([1, 2], [3]), turn([1, 2, 3, 8, 9], [4]))
    assert attempt.completion_tokens == 4


def test_lengths_count_what_each_conversation_of_a_rollout_adds_to_its_own_first_prompt(turn, rollout) -> None:
    agents = rollout(turn([1] * 50, [3]), turn([2, 9], [4, 5]), turn([2, 9, 4, 5, 8], [6]))
    assert agents.completion_tokens == 1 + 2 + 1 + 1
    rewritten = rollout(turn([1] * 50, [3]), turn([7] * 20, [4]))
    assert rewritten.completion_tokens == 2


def test_the_length_weighted_mean_of_rewritten_histories_lies_between_the_rewards(turn, rollout) -> None:
    calls = (turn([1] * 5, [3]), turn([7] * 2, [4]))
    group = Group([rollout(*calls, reward=1.0), rollout(turn([1] * 5, [3, 4]), reward=0.0)])
    assign_advantages([group], setup_advantage(DefaultAdvantageConfig(length_weighted_mean=True)))
    assert advantages([group]) == [[0.5, -0.5]]


def test_a_group_without_tokens_falls_back_to_the_plain_mean(rollout) -> None:
    group = Group([rollout(reward=1.0), rollout(reward=0.0)])
    assign_advantages([group], setup_advantage(DefaultAdvantageConfig(length_weighted_mean=True)))
    assert advantages([group]) == [[0.5, -0.5]]


def test_without_a_config_the_advantages_are_the_rewards(groups) -> None:
    assign_advantages(groups, setup_advantage(None))
    assert advantages(groups) == [[1.0, 0.0], [0.5, 0.5]]


def test_a_custom_function_gets_rewards_and_lengths_of_all_groups_and_its_kwargs(groups, own_module: str) -> None:
    config = CustomAdvantageConfig(type="custom", import_path=f"{own_module}.rank_by_length", kwargs={"scale": 2.0})
    assign_advantages(groups, setup_advantage(config))
    assert advantages(groups) == [[2.0, 0.0], [2.0, 2.0]]


def test_a_custom_function_that_cannot_be_imported_is_one_error_line() -> None:
    config = CustomAdvantageConfig(type="custom", import_path="no_such_module.advantage")
    with pytest.raises(OrchestratorError, match=r"advantage\.import_path: cannot import 'no_such_module.advantage'"):
        setup_advantage(config)


def test_an_advantage_of_the_wrong_shape_is_an_error_with_both_shapes(groups, own_module: str) -> None:
    config = CustomAdvantageConfig(type="custom", import_path=f"{own_module}.wrong_shape")
    with pytest.raises(OrchestratorError, match=r"returned advantages of shape \(1, 2\) for rewards of shape \(2, 2\)"):
        assign_advantages(groups, setup_advantage(config))


@pytest.mark.parametrize(("function", "kind"), [("bare_tensor", "Tensor"), ("list_of_numbers", "list")])
def test_what_is_no_tensor_of_advantages_is_one_error_line(groups, own_module: str, function: str, kind: str) -> None:
    config = CustomAdvantageConfig(type="custom", import_path=f"{own_module}.{function}")
    with pytest.raises(OrchestratorError, match=f"returned a {kind}, not AdvantageOutputs with a tensor"):
        assign_advantages(groups, setup_advantage(config))


def test_an_advantage_that_is_no_number_is_an_error_with_the_rewards_of_its_group(groups, own_module: str) -> None:
    config = CustomAdvantageConfig(type="custom", import_path=f"{own_module}.divided_by_nothing")
    with pytest.raises(OrchestratorError, match=r"returned \[nan, nan\] for a group with the rewards \[0.5, 0.5\]"):
        assign_advantages(groups, setup_advantage(config))


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("wrong_shape", r"returned advantages of shape \(1, 4\) for rewards of shape \(3, 4\)"),
        ("bare_tensor", "returned a Tensor, not AdvantageOutputs"),
        ("divided_by_nothing", r"returned \[nan, nan, nan, nan\] for a group with the rewards \[0.5, 0.5, 0.5, 0.5\]"),
        ("of_other_names", r"it raised AttributeError: .*'scores' \(advantages_of_a_user.py, line 17\)"),
        ("missing", "cannot import .*has no attribute 'missing'"),
    ],
)
def test_a_custom_function_is_called_on_made_up_rewards_before_the_start(
    own_module: str, function: str, fault: str
) -> None:
    with pytest.raises(OrchestratorError, match=fault) as caught:
        try_advantage(config_with(f"{own_module}:{function}"))
    assert str(caught.value).startswith("orchestrator.advantage.import_path")
    assert len(str(caught.value).splitlines()) == 1


def test_groups_of_equal_rewards_are_not_tried_where_the_buffer_drops_them(own_module: str) -> None:
    try_advantage(config_with(f"{own_module}:divided_by_nothing", buffer={"drop_equal_rewards": True}))


def config_with(import_path: str, **sections: object) -> OrchestratorConfig:
    advantage = {"type": "custom", "import_path": import_path}
    return OrchestratorConfig.model_validate(
        {"advantage": advantage, "rollouts_per_example": 4, "batch_size": 8, "env": [{"id": "x"}], **sections}
    )
