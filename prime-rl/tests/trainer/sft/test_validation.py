"""Validation during SFT and the best checkpoint."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from prime_rl.configs.data import SFTDataConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import ModelConfig, TokenizerConfig
from prime_rl.run.early_stop import EarlyEnd
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.tokenizer import setup_tokenizer
from prime_rl.trainer.process.mesh import DataAxis, Mesh
from prime_rl.trainer.sft.data.conversation import ConversationTokenizer
from prime_rl.trainer.sft.run import run
from prime_rl.trainer.sft.step import CrossEntropy
from prime_rl.trainer.sft.validation import Validation
from prime_rl.utils.pydantic_config import ConfigError, dump_toml, load_config


def write_rows(file: Path, seed: int, count: int) -> Path:
    words = random.Random(seed)
    rows = [{"prompt": "say it", "completion": f"{words.random():.{words.randint(1, 12)}f}"} for _ in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def base(tiny_model_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "device": "cpu",
        "model": {"name": str(tiny_model_dir), "attn": "sdpa"},
        "data": {"name": str(write_rows(tmp_path / "train.jsonl", 0, 40)), "batch_size": 2, "seq_len": 128},
        "val": {"interval": 2, "data": {"name": str(write_rows(tmp_path / "val.jsonl", 1, 11))}},
        "optim": {"lr": 1e-3},
        "max_steps": 5,
    }


def run_sft(base: dict[str, Any], output_dir: Path, **changes: Any) -> list[dict[str, Any]]:
    """Read the run's metrics."""
    assert run(SFTConfig(**{**base, "output_dir": output_dir, **changes})) == 0
    return [json.loads(line) for line in RunPaths(output_dir).metrics.read_text().splitlines()]


def test_the_loss_is_the_mean_over_the_trained_tokens_of_each_row(
    base: dict[str, Any], tiny_model_dir: Path, mesh: Mesh
) -> None:
    config = SFTDataConfig(**base["val"]["data"], seq_len=100)
    model_config = ModelConfig(name=str(tiny_model_dir), attn="sdpa")
    tokenizer = setup_tokenizer(TokenizerConfig(), model_config)
    model = setup_model(model_config, mesh)
    before = torch.get_rng_state()
    stats = Validation(config, tokenizer, mesh, CrossEntropy()).run(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training

    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tokenize = ConversationTokenizer(tokenizer, config.loss_mask)
    loss_sum, count = 0.0, 0
    for line in Path(config.name).read_text().splitlines():
        sample = tokenize(json.loads(line))
        ids = torch.from_numpy(sample.token_ids).long()[None]
        labels = ids.masked_fill(~torch.from_numpy(sample.is_trained)[None], -100)
        loss_sum += plain(input_ids=ids, labels=labels).loss.item() * sample.targets
        count += sample.targets
    assert stats.loss == pytest.approx(loss_sum / count, rel=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_data_ranks_divide_the_rows_and_compute_as_many(
    base: dict[str, Any], tiny_model_dir: Path, mesh: Mesh, rank: int
) -> None:
    config = SFTDataConfig(**base["val"]["data"], seq_len=64)
    tokenizer = setup_tokenizer(TokenizerConfig(), ModelConfig(name=str(tiny_model_dir)))
    axes = DataAxis(0, 1), DataAxis(rank, 2)
    alone, half = (Validation(config, tokenizer, replace(mesh, data_axis=axis), CrossEntropy()) for axis in axes)
    assert len(half._own_rows) == (len(alone._own_rows) + 1) // 2
    shared = [row.input_ids.tolist() for row in alone._own_rows[rank::2]]
    assert [row.input_ids.tolist() for row in half._own_rows][: len(shared)] == shared
    assert half._sizes == alone._sizes


def test_a_run_validates_and_trains_as_without(base: dict[str, Any], tmp_path: Path, capsys) -> None:
    records = run_sft(base, tmp_path / "with", val={**base["val"], "on_start": True})
    validations = [record for record in records if "val/loss" in record]
    assert [record["step"] for record in validations] == [0, 2, 4, 5]
    losses = [record["val/loss"] for record in validations]
    assert losses == sorted(losses, reverse=True)
    assert all(
        record["val/perplexity"] == pytest.approx(torch.tensor(record["val/loss"]).exp().item(), rel=1e-4)
        for record in validations
    )
    assert f"Validation after 4 steps | Loss: {losses[2]:.4f}" in capsys.readouterr().out

    run_sft(base, tmp_path / "without", val=None)
    one, other = (load_file(RunPaths(tmp_path / name).weight(5) / "model.safetensors") for name in ("with", "without"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_best_step_is_saved_noted_and_never_pruned(base: dict[str, Any], tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "out")
    ckpt = {"keep_last": 1, "keep_best": True, "weights": None}
    run_sft(base, paths.root, max_steps=3, ckpt=ckpt)
    assert json.loads(paths.best_checkpoint.read_text())["step"] == 3
    # This learning rate ruins the model, so all later steps are worse.
    again = {**ckpt, "resume_step": 3, "skip_scheduler": True}
    records = run_sft(base, paths.root, max_steps=6, optim={"lr": 1.0}, ckpt=again)
    losses = {record["step"]: record["val/loss"] for record in records if "val/loss" in record}
    assert losses[6] > losses[3]
    assert json.loads(paths.best_checkpoint.read_text()) == {"step": 3, "val_loss": losses[3]}
    assert stable_steps(paths.checkpoints) == [3, 6]


def test_a_run_without_progress_ends_early_and_continues_with_more_patience(
    base: dict[str, Any], tmp_path: Path, capsys
) -> None:
    """This learning rate ruins the model in the first step, so that the model before it is the best."""
    paths = RunPaths(tmp_path / "out")
    changes = {"optim": {"lr": 1.0}, "max_steps": 9, "val": {**base["val"], "interval": 1, "on_start": True}}
    records = run_sft(base, paths.root, **changes, ckpt={}, early_stop={"patience": 2})
    assert max(record["step"] for record in records) == 2
    assert (stable_steps(paths.checkpoints), stable_steps(paths.weights)) == ([2], [2])
    end = EarlyEnd.read(paths.early_end)
    assert end is not None
    losses = [record["val/loss"] for record in records if "val/loss" in record]
    assert (end.step, [value for _, value in end.history.evaluations]) == (2, losses)
    assert end.why.startswith("val/loss did not improve in 2 evaluations: the best is ")
    assert f"The run ends early, after 2 steps: {end.why}" in capsys.readouterr().out

    records = run_sft(base, paths.root, **changes, ckpt={"resume_step": -1}, early_stop={"patience": 3})
    end = EarlyEnd.read(paths.early_end)
    assert end is not None
    assert (end.step, len(end.history.evaluations)) == (3, 4)
    run_sft(base, paths.root, **{**changes, "max_steps": 4}, ckpt={"resume_step": -1})
    assert stable_steps(paths.weights)[-1] == 4
    assert not paths.early_end.exists()


def test_keys_that_val_does_not_name_are_those_of_data(base: dict[str, Any], tmp_path: Path) -> None:
    data = {**base["data"], "micro_batch_size": 2, "splits": ["train"], "loss_mask": {"user": True}}
    config = SFTConfig(**{**base, "data": data})
    assert config.val.data.seq_len == 128
    assert config.val.data.micro_batch_size == 2
    assert config.val.data.loss_mask.user
    assert config.val.data.splits is None
    dump_toml(config, tmp_path / "sft.toml")
    assert load_config(SFTConfig, [tmp_path / "sft.toml"], {}).val == config.val


def test_faults_of_a_config_with_validation(base: dict[str, Any], tmp_path: Path) -> None:
    dump_toml(SFTConfig(**base), tmp_path / "sft.toml")
    with pytest.raises(ConfigError, match="validation reads all of its rows"):
        load_config(SFTConfig, [tmp_path / "sft.toml"], {"val": {"data": {"streaming": True}}})
    with pytest.raises(ConfigError, match=r"ckpt\.keep_best needs \[val\]"):
        load_config(SFTConfig, [tmp_path / "sft.toml"], {"val": None, "ckpt": {"keep_best": True}})
