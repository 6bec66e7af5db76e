"""Environment variables: root keys only, weaker than files."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

import prime_rl
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.launch.reaper import MARK_VARIABLE
from prime_rl.utils.pydantic_config import ConfigWarning, load_config
from prime_rl.utils.pydantic_config.arguments import NOT_KEYS

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
    for name in ("PRIME_API_KEY", "PRIME_LOG_LEVEL", *NOT_KEYS):
        monkeypatch.setenv(name, "secret")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigWarning)
        assert load_config(TrainerConfig) == TrainerConfig()


@pytest.mark.parametrize(
    ("variable", "line"),
    [
        ("PRIME_RL_MAX_STEP", "trainer has no key max_step; did you mean PRIME_RL_MAX_STEPS?"),
        ("PRIME_RL_LR", "trainer has no key lr; did you mean PRIME_RL_OPTIM__LR or PRIME_RL_CRITIC__OPTIM__LR?"),
        ("prime_rl_lr", "trainer has no key lr; did you mean PRIME_RL_OPTIM__LR or PRIME_RL_CRITIC__OPTIM__LR?"),
        ("PRIME_RL_ORCHESTRATOR__BATCH_SIZE", "trainer has no key orchestrator.batch_size"),
        ("PRIME_RL_NOPE", "trainer has no key nope"),
        ("PRIME_RL_TOML_FILES", "trainer has no key toml_files"),
    ],
)
def test_a_variable_that_is_ignored_is_named_with_the_nearest_key(
    monkeypatch: pytest.MonkeyPatch, variable: str, line: str
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.warns(ConfigWarning, match=f"^{re.escape(f'{variable} is ignored: {line}')}$"):
        load_config(TrainerConfig)


def test_the_processes_of_a_launch_do_not_repeat_the_launcher_s_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_RL_NOPE", "1")
    monkeypatch.setenv(MARK_VARIABLE, "mark")
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", ConfigWarning)
        load_config(TrainerConfig)
    assert [str(each.message) for each in given] == []


def test_every_variable_of_the_code_with_the_prefix_is_known() -> None:
    source = Path(prime_rl.__file__).parent
    used = {
        name for file in source.rglob("*.py") for name in re.findall(r'"(PRIME_RL_[A-Z_]+[A-Z])"', file.read_text())
    }
    assert used == NOT_KEYS


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
