"""SFT and RL runs that train adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.shared import FileSystemTransportConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.trainer.rl.run import train
from prime_rl.trainer.sft.run import run
from prime_rl.transport import setup_batch_sender
from prime_rl.transport.messages import TrainingBatch, TrainingSample
from prime_rl.utils.contents import write_marker

EXTRAS = {"use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 3}, "loraplus_lr_ratio": 4.0}


@pytest.fixture
def base(tiny_model_dir: Path, tmp_path: Path) -> dict[str, Any]:
    """SFT on questions whose answer repeats the question, with dropout and the last norm trained in full."""
    file = tmp_path / "echo.jsonl"
    words = ["heart", "lung", "spleen", "aorta", "femur", "tibia", "iris", "uvula"]
    file.write_text("".join(json.dumps({"prompt": a + b, "completion": a + b}) + "\n" for a in words for b in words))
    lora = {"rank": 8, "alpha": 32.0, "modules_to_save": ["model.norm"]}
    return {
        "device": "cpu",
        "model": {"name": str(tiny_model_dir), "attn": "sdpa", "lora": lora},
        "data": {"name": str(file), "batch_size": 4, "micro_batch_size": 2, "seq_len": 64},
        "optim": {"lr": 1e-2},
        "max_steps": 6,
    }


def run_sft(base: dict[str, Any], output_dir: Path, **changes: Any) -> None:
    """Run SFT in this process as a new process would."""
    torch.manual_seed(torch.default_generator.initial_seed())
    assert run(SFTConfig(**{**base, "output_dir": output_dir, **changes})) == 0


def losses_of(output_dir: Path) -> list[float]:
    return [json.loads(line)["loss/mean"] for line in RunPaths(output_dir).metrics.read_text().splitlines()]


def test_sft_learns_and_exports_merged_weights_and_the_adapter(base: dict[str, Any], tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    run_sft(base, out, max_steps=30, ckpt={"weights": {"save_adapter_separately": True}})
    losses = losses_of(out)
    assert losses[-1] < losses[0] - 0.5
    assert "LoRA: 14 adapters, " in capsys.readouterr().out
    directory, tokens = RunPaths(out).weight(30), torch.arange(4, 100)[None]
    merged = AutoModelForCausalLM.from_pretrained(directory)
    start = AutoModelForCausalLM.from_pretrained(base["model"]["name"])
    loaded = peft.PeftModel.from_pretrained(start, directory / "lora_adapters")
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, loaded(tokens).logits, rtol=1e-4, atol=1e-4)


PISSA = {"init": "pissa", "use_rslora": True, "rank_pattern": {"q_proj": 3}}
LOFTQ = {"init": "loftq"}


@pytest.mark.parametrize(
    ("extras", "in_background"),
    [({}, False), (EXTRAS, True), (PISSA, False), (LOFTQ, False)],
    ids=["plain", "extras", "pissa", "loftq"],
)
def test_a_resumed_run_is_bit_identical(
    base: dict[str, Any], tmp_path: Path, monkeypatch, extras: dict[str, Any], in_background: bool
) -> None:
    folder = shutil.copytree(base["model"]["name"], tmp_path / "model")
    base["model"] |= {"name": str(folder), "quantization": "nf4" if extras is LOFTQ else None}
    base["model"]["lora"] |= {"dropout": 0.2, **extras}
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    run_sft(base, straight)
    run_sft(base, halves, max_steps=3, ckpt={"async_save": in_background})
    # What the checkpoint holds is neither read from the model nor found again by PiSSA or LoftQ.
    weights = load_file(folder / "model.safetensors")
    trained = {"model.norm.weight": torch.full_like(weights["model.norm.weight"], torch.nan)}
    save_file(weights | trained, folder / "model.safetensors", {"format": "pt"})
    monkeypatch.delattr(torch.linalg, "svd")
    run_sft(base, halves, ckpt={"resume_step": -1})
    assert losses_of(halves) == losses_of(straight)
    one, other = (load_file(RunPaths(out).weight(6) / "model.safetensors") for out in (straight, halves))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_has_only_trained_parameters(base: dict[str, Any], tmp_path: Path) -> None:
    run_sft(base, tmp_path / "out", max_steps=1, ckpt={})
    saved = FileSystemReader(RunPaths(tmp_path / "out").trainer_checkpoint(1)).read_metadata().state_dict_metadata
    weights = {name for name in saved if name.startswith("policy.model.")}
    assert len(weights) == 2 * 14 + 1
    assert all(".lora." in name or name.endswith("model.norm.weight") for name in weights)


def test_a_checkpoint_is_refused_with_other_base_weights_or_another_scale(
    base: dict[str, Any], tiny_model_dir: Path, tmp_path: Path, capsys
) -> None:
    out, other_model = tmp_path / "out", tmp_path / "other_model"
    run_sft(base, out, max_steps=1, ckpt={})
    shutil.copytree(tiny_model_dir, other_model)
    weights = load_file(other_model / "model.safetensors")
    weights["model.embed_tokens.weight"][0, 0] += 1
    save_file(weights, other_model / "model.safetensors", metadata={"format": "pt"})

    def fault(**model: Any) -> str:
        with pytest.raises(SystemExit):
            run_sft({**base, "model": {**base["model"], **model}}, out, ckpt={"resume_step": -1})
        return capsys.readouterr().out

    assert "with model.lora.alpha 32.0 -> 16.0: the checkpoint does not fit another adapter" in fault(
        lora={**base["model"]["lora"], "alpha": 16.0}
    )
    assert "with model.lora set -> unset: the checkpoint does not fit another adapter" in fault(lora=None)

    # Checkpoints of older versions hold no configs and no hashes. Their weights are compared.
    shutil.rmtree(RunPaths(out).saved_config(1, "sft").parent)
    write_marker(RunPaths(out).checkpoint(1), {})
    assert "model.lora.alpha / rank = 4, and this config trains with model.lora.alpha / rank = 2" in fault(
        lora={**base["model"]["lora"], "alpha": 16.0}
    )
    assert "this config trains with patterns of scales from 2 to 4" in fault(
        lora={**base["model"]["lora"], "alpha_pattern": {"layers\\.1\\.": 16.0}}
    )
    assert "alpha / rank = 4, and this config trains without model.lora" in fault(lora=None)
    assert "other_model is not the model that it was trained on" in fault(name=str(other_model))
    run_sft({**base, "model": {**base["model"], "compute_dtype": "bfloat16"}}, out, ckpt={"resume_step": -1})


def test_the_best_step_is_kept(base: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    val = {"interval": 2, "data": {"name": base["data"]["name"], "seq_len": 64}}
    run_sft(base, out, val=val, ckpt={"keep_best": True, "keep_last": 1})
    best = json.loads(RunPaths(out).best_checkpoint.read_text())["step"]
    assert best in stable_steps(RunPaths(out).checkpoints)


@pytest.mark.parametrize(
    ("extras", "optimizer"), [(EXTRAS, "adamw"), (PISSA, "adafactor")], ids=["extras", "pissa-and-adafactor"]
)
def test_two_processes_train_like_one_and_resume_bit_identically(
    base: dict[str, Any],
    tmp_path: Path,
    assert_two_processes_train_like_one: Callable[[SFTConfig], None],
    extras: dict[str, Any],
    optimizer: str,
) -> None:
    base["model"]["lora"] |= extras
    base["optim"]["type"] = optimizer
    config = {**base, "scheduler": {"type": "linear", "warmup_steps": 2, "decay_steps": 2}}
    assert_two_processes_train_like_one(SFTConfig(**{**config, "output_dir": tmp_path}))


def batch(step: int) -> TrainingBatch:
    generator = torch.Generator().manual_seed(step)

    def sample(advantage: float) -> TrainingSample:
        tokens = torch.randint(4, 100, (40,), generator=generator).tolist()
        return TrainingSample(
            prompt_ids=tokens[:10],
            prompt_mask=[False] * 10,
            completion_ids=tokens[10:],
            completion_mask=[True] * 30,
            inference_logprobs=[-4.8] * 30,
            completion_temperatures=[1.0] * 30,
            advantage=advantage,
        )

    return TrainingBatch([sample(advantage) for advantage in (1.0, -0.5, 0.7, -1.2)], step)


def run_rl(out: Path, model: Path, steps: range, path: str | None = None, **settings: Any) -> None:
    sender = setup_batch_sender(FileSystemTransportConfig(), RunPaths(out).orchestrator)
    for step in steps:
        sender.send(batch(step))
    lora = {"rank": 4, "alpha": 16.0, "path": path}
    fixed = {"device": "cpu", "parity": {"on_mismatch": "off"}, "optim": {"lr": 1e-2}, "max_steps": steps.stop}
    model_config = {"name": str(model), "attn": "sdpa", "seq_len": 128, "lora": lora}
    train(TrainerConfig(output_dir=out, model=model_config, **fixed, **settings), RunPaths(out))


def test_rl_publishes_each_version_as_an_adapter_and_exports_it_merged(tiny_model_dir: Path, tmp_path: Path) -> None:
    run_rl(tmp_path, tiny_model_dir, range(2))
    paths = RunPaths(tmp_path)
    assert stable_steps(paths.orchestrator.broadcasts) == [1, 2], "version 0 is the model itself"
    assert not (paths.orchestrator.broadcast(2) / "model.safetensors").exists()
    first, last = (load_file(paths.orchestrator.broadcast(v) / "adapter_model.safetensors") for v in (1, 2))
    assert any(not torch.equal(first[name], last[name]) for name in first)
    merged, start = (AutoModelForCausalLM.from_pretrained(path) for path in (paths.weight(2), tiny_model_dir))
    loaded = peft.PeftModel.from_pretrained(start, paths.orchestrator.broadcast(2))
    tokens = torch.arange(4, 100)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, loaded(tokens).logits, rtol=1e-4, atol=1e-4)


def test_rl_from_an_adapter_publishes_it_as_version_0(tiny_model_dir: Path, tmp_path: Path) -> None:
    run_rl(tmp_path / "first", tiny_model_dir, range(1))
    start = RunPaths(tmp_path / "first").orchestrator.broadcast(1)
    run_rl(tmp_path / "second", tiny_model_dir, range(1), path=str(start))
    paths = RunPaths(tmp_path / "second").orchestrator
    assert stable_steps(paths.broadcasts) == [0, 1]
    given, sent, trained = (
        load_file(folder / "adapter_model.safetensors") for folder in (start, paths.broadcast(0), paths.broadcast(1))
    )
    assert all(torch.equal(given[name], sent[name]) for name in given)
    assert any(not torch.equal(given[name], trained[name]) for name in given)


def test_two_processes_continue_an_adapter_like_one(
    base: dict[str, Any], tmp_path: Path, assert_two_processes_train_like_one: Callable[[SFTConfig], None]
) -> None:
    run_sft(base, tmp_path / "first", ckpt={"weights": {"save_adapter_separately": True}})
    base["model"]["lora"]["path"] = str(tmp_path / "first")
    assert_two_processes_train_like_one(SFTConfig(**{**base, "output_dir": tmp_path / "second"}))


def test_rl_resumes_bit_identically(tiny_model_dir: Path, tmp_path: Path) -> None:
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    run_rl(straight, tiny_model_dir, range(2))
    run_rl(halves, tiny_model_dir, range(1), ckpt={})
    run_rl(halves, tiny_model_dir, range(1, 2), ckpt={"resume_step": 1})
    one, other = (
        load_file(RunPaths(out).orchestrator.broadcast(2) / "adapter_model.safetensors") for out in (straight, halves)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
