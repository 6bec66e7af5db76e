"""Environment variables: root keys only, weaker than files."""

from __future__ import annotations

import pytest

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.utils.pydantic_config import load_config

RL = ["--trainer", "--orchestrator", "--inference"]


@pytest.mark.parametrize("prefix", ["PRIME_", "PRIME_RL_", "prime_rl_"])
def test_both_prefixes_fill_root_keys(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    monkeypatch.setenv(f"{prefix}MODEL__NAME", "m")
    monkeypatch.setenv(f"{prefix}MAX_STEPS", "7")
    config = load_config(TrainerConfig)
    assert (config.model.name, config.max_steps) == ("m", 7)


def test_the_longer_prefix_is_stronger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_RL_MAX_STEPS", "2")
    monkeypatch.setenv("PRIME_MAX_STEPS", "1")
    assert load_config(TrainerConfig).max_steps == 2


def test_sections_and_lists_are_json_and_single_keys_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_RL_CLIENT", '{"base_url": ["http://a"], "timeout": 1}')
    monkeypatch.setenv("PRIME_RL_CLIENT__TIMEOUT", "2")
    config = load_config(OrchestratorConfig)
    assert (config.client.base_url, config.client.timeout) == (["http://a"], 2)


def test_nested_roots_read_nothing_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_RL_OPTIM__LR", "0.25")
    monkeypatch.setenv("PRIME_RL_SEED", "9")
    monkeypatch.setenv("PRIME_RL_NAME", "x")
    config = load_config(RLConfig, [], [*RL, "--wandb", "--model"])
    assert (config.trainer.optim.lr, config.orchestrator.optim.lr) == (1e-6, 1e-4)
    assert (config.inference.seed, config.orchestrator.seed) == (0, 42)
    assert (config.wandb.name, config.model.name) == (None, "Qwen/Qwen3-0.6B")


def test_a_variable_below_an_optional_section_switches_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_RL_INFERENCE__MAX_LORAS", "2")
    assert load_config(RLConfig, [], RL[:2]).inference.max_loras == 2


def test_files_are_stronger(monkeypatch: pytest.MonkeyPatch, toml) -> None:
    monkeypatch.setenv("PRIME_RL_MAX_STEPS", "1")
    monkeypatch.setenv("PRIME_RL_OPTIM__LR", "0.5")
    config = load_config(TrainerConfig, [toml("max_steps = 2")])
    assert (config.max_steps, config.optim.lr) == (2, 0.5)


def test_other_people_s_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PRIME_API_KEY", "PRIME_LOG_LEVEL", "PRIME_RL_NOPE", "PRIME_RL_TOML_FILES"):
        monkeypatch.setenv(name, "secret")
    assert load_config(TrainerConfig) == TrainerConfig()


def test_a_fault_names_the_variable(monkeypatch: pytest.MonkeyPatch, faults) -> None:
    monkeypatch.setenv("PRIME_RL_MODEL__NMAE", "1")
    monkeypatch.setenv("PRIME_MAX_STEPS", "abc")
    assert sorted(faults(TrainerConfig)) == [
        "PRIME_MAX_STEPS: max_steps: should be a valid integer (got 'abc')",
        "PRIME_RL_MODEL__NMAE: model.nmae: unknown key; did you mean model.name?",
    ]


def test_malformed_json_names_the_variable(monkeypatch: pytest.MonkeyPatch, faults) -> None:
    monkeypatch.setenv("PRIME_RL_MODEL", "{")
    assert faults(TrainerConfig)[0].startswith("PRIME_RL_MODEL: '{' is not JSON")
