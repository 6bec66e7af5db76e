"""One key chooses a published algorithm; it fills visible keys, and those that the user gives stay."""

from __future__ import annotations

from typing import get_args

import pytest

from prime_rl.configs.algorithms import PRESETS, Algorithm
from prime_rl.configs.rl import RLConfig
from prime_rl.utils.pydantic_config import ConfigWarning, dump_toml, load_config

GROUPS = ("--orchestrator.rollouts-per-example=8", "--orchestrator.sampling.max-tokens=100")


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
def test_an_algorithm_expands_to_the_keys_it_names(rl, tmp_path, algorithm) -> None:
    run = rl(f"--algorithm={algorithm}", *GROUPS)
    resolved = run.model_dump()
    for section, values in PRESETS[algorithm].items():
        found = resolved
        for part in section.split("."):
            found = found[part]
        assert {key: found[key] for key in values} == dict(values)
    dump_toml(run, tmp_path / "rl.toml")
    assert load_config(RLConfig, [tmp_path / "rl.toml"], []) == run


def test_without_an_algorithm_nothing_changes(rl) -> None:
    run = rl()
    assert (run.trainer.loss.type, run.orchestrator.advantage.type) == ("default", "default")
    assert run == rl("--algorithm=default")


def test_a_key_that_the_config_gives_stays(rl) -> None:
    run = rl("--algorithm=dapo", *GROUPS, "--trainer.loss.clip-high=0.4", "--no-orchestrator.buffer.drop-equal-rewards")
    assert (run.trainer.loss.type, run.trainer.loss.clip_high, run.trainer.loss.clip_low) == ("clip", 0.4, 0.2)
    assert not run.orchestrator.buffer.drop_equal_rewards


def test_a_section_of_another_type_stays_whole(rl) -> None:
    run = rl("--algorithm=grpo", *GROUPS, "--trainer.loss.type=default", "--orchestrator.advantage=null")
    assert run.trainer.loss.type == "default"
    assert run.orchestrator.advantage is None


def test_lengths_follow_the_longest_answer(rl) -> None:
    assert rl("--algorithm=dr_grpo", *GROUPS).trainer.loss.constant_tokens == 100
    assert rl("--algorithm=dr_grpo", GROUPS[0], "--seq-len=64").trainer.loss.constant_tokens == 64
    overlong = rl("--algorithm=dapo", *GROUPS).orchestrator.advantage.overlong
    assert (overlong.max_tokens, overlong.buffer_tokens) == (100, 20)


def test_dapo_without_a_longest_answer_says_what_it_lacks(rl) -> None:
    with pytest.warns(ConfigWarning, match="'dapo' has no overlong penalty without orchestrator.sampling.max_tokens"):
        rl("--algorithm=dapo", GROUPS[0])


def test_a_lone_rollout_cannot_be_compared(rl_faults) -> None:
    (fault,) = rl_faults("--algorithm=grpo")
    assert "rollouts_per_example is 1" in fault


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trainer.critic.gamma=1"], "orchestrator.advantage.type = 'default' subtracts the mean of the group"),
        (["--algorithm=ppo", "--orchestrator.advantage.scale=batch"], "orchestrator.advantage has scale = 'batch'"),
        (["--algorithm=ppo", "--orchestrator.advantage.whiten"], "whiten = True: set trainer.critic.whiten instead"),
        (["--algorithm=ppo", "--trainer.critic=null"], "'ppo' needs [trainer.critic]"),
    ],
)
def test_a_critic_takes_rewards_as_they_are(rl_faults, options: list[str], words: str) -> None:
    (fault,) = rl_faults(*options)
    assert words in fault


def test_a_critic_is_trained_like_its_policy_unless_the_config_says_otherwise(rl) -> None:
    given = ["--algorithm=ppo", "--trainer.optim.lr=3e-5", "--trainer.optim.betas2=0.95"]
    assert rl(*given).trainer.critic.optim == rl(*given).trainer.optim
    own = rl(*given, "--trainer.critic.optim.lr=1e-4").trainer.critic.optim
    assert (own.lr, own.betas2) == (1e-4, 0.95)
    other = rl(*given, "--trainer.critic.optim.type=muon", "--trainer.critic.optim.lr=1e-4").trainer.critic.optim
    assert (other.type, other.betas2) == ("muon", 0.95)
    with pytest.warns(ConfigWarning, match="leaves none of max_steps = 5 to train the policy"):
        rl("--algorithm=ppo", "--max-steps=5", "--trainer.critic.warmup-steps=5")
