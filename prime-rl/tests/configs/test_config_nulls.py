"""Nulls: written as `"None"` anywhere, and kept by a dump."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.utils.pydantic_config import dump_toml, load_config

RL = ["--trainer", "--orchestrator", "--inference"]

CONFIGS = {
    "plain": (RLConfig, RL),
    "no server": (RLConfig, RL[:2]),
    "nulls": (
        RLConfig,
        [*RL, "--no-orchestrator.advantage", "--orchestrator.seed", "null", "--log.level", "null", "--log.file=null"],
    ),
    "no weights": (RLConfig, [*RL, "--ckpt.interval", "5", "--no-trainer.ckpt.weights"]),
    "extras": (RLConfig, [*RL, "--wandb.name", "n", "--no-orchestrator.wandb.log-extras"]),
    "bench": (RLConfig, [*RL, "--bench", "--ckpt", "--wandb", "--max-steps", "20"]),
    "nccl bench": (RLConfig, [*RL, "--bench", "--weight-broadcast.type", "nccl"]),
    "nccl": (RLConfig, [*RL, "--weight-broadcast.type", "nccl", "--deployment.num-infer-gpus", "4"]),
    "lora": (RLConfig, [*RL, "--trainer.model.lora.rank", "12"]),
    "teacher": (RLConfig, [*RL, "--deployment.num-teacher-gpus", "2", "--trainer.loss.teacher-tau", "1"]),
    "tokens": (
        RLConfig,
        [*RL, "--orchestrator.token-batch-size", "999", "--orchestrator.max-inflight-rollouts", "8", "--bench"],
    ),
    "gpu ids": (RLConfig, [*RL, "--inference-gpu-ids", "0,1", "--trainer-gpu-ids", "6"]),
    "sft": (SFTConfig, ["--bench", "--optim.type", "sgd", "--data.subsets", "a,b"]),
    "trainer": (
        TrainerConfig,
        ["--bench", "--model.ac-offloading", "--loss.type", "custom", "--loss.import-path", "x.y"],
    ),
    "env args": (OrchestratorConfig, ["--env", '{"id": "x", "args": {"a": null, "b": [null, {"c": null}], "d": 1.5}}']),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_dump_loads_to_an_equal_config_without_a_warning(name: str, tmp_path: Path, recwarn) -> None:
    config_cls, options = CONFIGS[name]
    config = load_config(config_cls, [], options)
    dump_toml(config, tmp_path / "dump.toml")
    recwarn.clear()
    assert load_config(config_cls, [tmp_path / "dump.toml"]) == config
    assert not recwarn.list


def test_a_dump_keeps_nulls_where_the_default_is_something_else(rl, tmp_path: Path) -> None:
    config = rl("--no-orchestrator.advantage", "--orchestrator.seed=null", "--ckpt", "--no-trainer.ckpt.weights")
    dump_toml(config.orchestrator, tmp_path / "orchestrator.toml")
    dump_toml(config.trainer, tmp_path / "trainer.toml")
    orchestrator = load_config(OrchestratorConfig, [tmp_path / "orchestrator.toml"])
    assert (orchestrator.advantage, orchestrator.seed) == (None, None)
    assert load_config(TrainerConfig, [tmp_path / "trainer.toml"]).ckpt.weights is None


def test_none_as_text_is_null_in_files_at_every_depth(toml) -> None:
    file = toml(
        'max_steps = "None"\nckpt = "None"\n[trainer]\nmax_steps = "None"\n[log]\nlevel = "None"\n'
        '[orchestrator]\nadvantage = "None"\nseed = "None"\n[[orchestrator.env]]\nargs = {a = "None"}'
    )
    config = load_config(RLConfig, [file])
    assert (config.log.level, config.orchestrator.advantage, config.orchestrator.seed) == (None, None, None)
    assert config.orchestrator.env[0].args == {"a": None}


def test_none_as_text_is_null_in_union_variants(toml) -> None:
    assert load_config(SFTConfig, [toml('[data]\nsubsets = "None"')]).data.subsets is None


@pytest.mark.parametrize("text", ["None", "null"])
def test_both_words_are_null_on_the_command_line(text: str) -> None:
    config = load_config(OrchestratorConfig, [], ["--seed", text, f"--wandb.name={text}", "--max-steps", text])
    assert (config.seed, config.wandb.name, config.max_steps) == (None, None, None)


def test_a_dump_replaces_the_file_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "dump.toml"
    dump_toml(TrainerConfig(), target)
    dump_toml(TrainerConfig(max_steps=3), target, exclude={"log"})
    assert "max_steps = 3" in target.read_text()
    assert "[log]" not in target.read_text()
    assert list(target.parent.iterdir()) == [target]


def test_values_of_environments_keep_their_types(toml, tmp_path: Path) -> None:
    args = 'date = 2024-01-02\ntext = "a\\"b\\\\ü\\n"\nnested = {x = [1, 2.5, true]}'
    config = load_config(OrchestratorConfig, [toml(f"[[env]]\nid = 'x'\n[env.args]\n{args}")])
    dump_toml(config, tmp_path / "dump.toml")
    assert load_config(OrchestratorConfig, [tmp_path / "dump.toml"]).env[0].args == config.env[0].args
