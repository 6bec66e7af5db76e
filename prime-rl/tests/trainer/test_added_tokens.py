"""Modules trained in full beside an adapter, and embeddings of added tokens: SFT, RL, PEFT and the embedded engine."""

from __future__ import annotations

import io
import json
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from rich.console import Console
from torch import Tensor

from prime_rl.checks import start_faults
from prime_rl.checks.model_files import adapter_faults
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.shared import FileSystemTransportConfig
from prime_rl.configs.trainer import LoRAConfig, ModelConfig, TrainerConfig
from prime_rl.inference.embedded.engine.model import load_model
from prime_rl.inference.embedded.engine.weights import load_weights, read_weights
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.trainer.rl.run import train
from prime_rl.trainer.sft.preflight import preflight
from prime_rl.trainer.sft.run import run
from prime_rl.transport import setup_batch_sender
from prime_rl.transport.messages import TrainingBatch, TrainingSample
from prime_rl.utils.errors import ConfigError
from prime_rl.utils.pydantic_config import ConfigWarning, dump_toml, load_config

ADDED = [f"<note{number}>" for number in range(40)]
"""The tiny model has 128 embeddings for 100 tokens."""
LORA = {"rank": 4, "alpha": 8.0, "modules_to_save": ["embed_tokens", "lm_head"]}


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    tokens = torch.arange(4, min(135, model.config.vocab_size))
    logits: Tensor = model(input_ids=tokens[None]).logits[0]
    return logits


def in_the_engine(model: Path, update: Path) -> tf.PreTrainedModel:
    """The weights of an embedded engine that serves `model`, after an update, as a model of Transformers."""
    served, _ = load_model(str(model), "float32", torch.device("cpu"))
    load_weights(served, read_weights(update), update)
    plain: tf.PreTrainedModel = tf.AutoModelForCausalLM.from_pretrained(model)
    plain.load_state_dict(served.state_dict())
    return plain


def base_of(directory: Path, rows: int) -> tf.PreTrainedModel:
    model: tf.PreTrainedModel = tf.AutoModelForCausalLM.from_pretrained(directory)
    model.resize_token_embeddings(rows)
    return model


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied head", "own head"])
def test_sft_adds_tokens_and_rl_continues(tiny_model_dir: Path, tmp_path: Path, is_tied: bool) -> None:
    start, data, out = tmp_path / "start", tmp_path / "data.jsonl", tmp_path / "sft"
    tokenizer = tf.AutoTokenizer.from_pretrained(tiny_model_dir)
    config = tf.AutoConfig.from_pretrained(tiny_model_dir, tie_word_embeddings=is_tied)
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(start)
    tokenizer.save_pretrained(start)
    rows = [{"prompt": word, "completion": f"<note7>{word}<note31>"} for word in ("heart", "lung", "spleen", "iris")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = {
        "device": "cpu",
        "max_steps": 3,
        "output_dir": str(out),
        "model": {"name": str(start), "attn": "sdpa", "lora": LORA},
        "tokenizer": {"add_tokens": ADDED},
        "data": {"name": str(data), "batch_size": 2, "micro_batch_size": 2, "seq_len": 64},
        "optim": {"lr": 1e-2},
        "ckpt": {"weights": {"save_adapter_separately": True}},
    }
    dump_toml(SFTConfig(**table), tmp_path / "sft.toml")
    assert run(load_config(SFTConfig, [tmp_path / "sft.toml"])) == 0
    assert "Embeddings: 12 more for added tokens (128 -> 140)" in RunPaths(out).rank_log(0).read_text()

    export = RunPaths(out).weight(3)
    exported = tf.AutoTokenizer.from_pretrained(export)
    assert exported.encode("<note7>a") == [tokenizer.vocab_size + 7, *tokenizer.encode("a")]
    assert exported.decode([139], skip_special_tokens=True) == "<note39>", "an added token is part of the text"
    merged = tf.AutoModelForCausalLM.from_pretrained(export)
    assert (merged.config.vocab_size, merged.config.tie_word_embeddings) == (140, is_tied)
    in_peft = peft.PeftModel.from_pretrained(base_of(start, 140), export / "lora_adapters")
    torch.testing.assert_close(logits_of(in_peft), logits_of(merged), rtol=1e-4, atol=1e-4)

    # The adapter itself fits the larger model alone: RL has to start from the export.
    model = ModelConfig(name=str(start), attn="sdpa", lora=LoRAConfig(**LORA, path=str(out)))
    (fault,) = adapter_faults("model", model, StartDir(tmp_path), adds_tokens=False)
    assert "it has 140 embeddings, for added tokens, and the model 128: set model.name to the export" in fault
    assert not list(adapter_faults("model", model, StartDir(tmp_path), adds_tokens=True))
    model = ModelConfig(name=str(export), attn="sdpa", lora=LoRAConfig(rank=4, alpha=8.0, path=str(out)))
    (fault,) = adapter_faults("model", model, StartDir(tmp_path), adds_tokens=False)
    assert 'set modules_to_save = ["model.embed_tokens", "lm_head"]' in fault

    rl = tmp_path / "rl"
    run_rl(rl, export, lora=LORA)
    served = in_the_engine(export, RunPaths(rl).orchestrator.broadcast(1))
    trained = tf.AutoModelForCausalLM.from_pretrained(RunPaths(rl).weight(1))
    torch.testing.assert_close(logits_of(served), logits_of(trained), rtol=1e-4, atol=1e-4)
    moved = (trained.get_input_embeddings().weight - merged.get_input_embeddings().weight).abs().max()
    assert moved > 0.001, "RL trains the embeddings, too"


def batch() -> TrainingBatch:
    generator = torch.Generator().manual_seed(0)

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

    return TrainingBatch([sample(advantage) for advantage in (1.0, -0.5, 0.7, -1.2)], 0)


def run_rl(out: Path, model: Path, **settings: Any) -> None:
    setup_batch_sender(FileSystemTransportConfig(), RunPaths(out).orchestrator).send(batch())
    fixed = {"device": "cpu", "parity": {"on_mismatch": "off"}, "optim": {"lr": 1e-2}, "max_steps": 1}
    model_config = {"name": str(model), "attn": "sdpa", "seq_len": 128, **settings}
    with pytest.warns(
        ConfigWarning,
        match="engines take plain adapters of linear layers of model.name alone",
    ):
        config = TrainerConfig(output_dir=out, model=model_config, **fixed)
    train(config, RunPaths(out))


def test_rl_continues_and_stacks_adapters_with_modules_that_engines_do_not_take(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    saved = {**LORA, "modules_to_save": ["model.norm"]}
    run_rl(tmp_path / "first", tiny_model_dir, lora=saved)
    first = RunPaths(tmp_path / "first")
    assert stable_steps(first.orchestrator.broadcasts) == [1]
    adapter = tmp_path / "adapter"
    reference = peft.get_peft_model(
        tf.AutoModelForCausalLM.from_pretrained(tiny_model_dir),
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], modules_to_save=["model.norm"]),
    )
    with torch.no_grad():
        for parameter in (each for each in reference.parameters() if each.requires_grad):
            parameter.add_(torch.full_like(parameter, 0.05))
    reference.save_pretrained(adapter)
    expected = logits_of(reference)
    chain = {"continued": {"lora": {**saved, "path": str(adapter)}}, "stacked": {"adapter": str(adapter), "lora": {}}}
    for name, settings in chain.items():
        run_rl(tmp_path / name, tiny_model_dir, **settings)
        broadcasts = RunPaths(tmp_path / name).orchestrator
        assert stable_steps(broadcasts.broadcasts) == [0, 1], name
        served = in_the_engine(tiny_model_dir, broadcasts.broadcast(0))
        torch.testing.assert_close(logits_of(served), expected, rtol=1e-4, atol=1e-4)


def test_without_a_way_to_train_them_added_tokens_are_one_line(tiny_model_dir: Path, tmp_path: Path) -> None:
    tokens = {"tokenizer": {"add_tokens": ["<think>"]}}
    for config, fault in {
        TrainerConfig: r"tokenizer.add_tokens \(<think>\) is for SFT: the engines have the tokenizer of model.name",
        SFTConfig: "eval with tokenizer.add_tokens: the server starts from model.name",
    }.items():
        evaluated = {"eval": {"env": [{"id": "reverse-text"}]}, "data": {"seq_len": 64}} if config is SFTConfig else {}
        with pytest.raises((ValueError, ConfigError), match=fault), warnings.catch_warnings():
            config(model={"name": str(tiny_model_dir)}, output_dir=tmp_path, **tokens, **evaluated)


def test_a_special_token_without_embedding_stops_only_rows_that_hold_it(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gemma 3's models for text have the token of images in their tokenizer, and no embedding for it."""
    start, data = tmp_path / "start", tmp_path / "data.jsonl"
    tokenizer = tf.AutoTokenizer.from_pretrained(tiny_model_dir)
    model = tf.AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    beyond = [f"<image{number}>" for number in range(model.config.vocab_size)]
    tokenizer.add_special_tokens({"additional_special_tokens": beyond})
    for each in (model, tokenizer):
        each.save_pretrained(start)
    table = {
        "device": "cpu",
        "max_steps": 1,
        "model": {"name": str(start), "attn": "sdpa"},
        "data": {"name": str(data), "batch_size": 1, "micro_batch_size": 1, "seq_len": 64},
    }
    for number, (word, is_good) in enumerate({"heart": True, f"a heart {beyond[-1]}": False}.items()):
        data.write_text(json.dumps({"prompt": word, "completion": "beats"}) + "\n")
        config = SFTConfig.model_validate(table | {"output_dir": str(tmp_path / str(number))})
        assert start_faults(config) == []
        for start_of in (lambda config: preflight(config, Console(file=io.StringIO())), run):
            with nullcontext() if is_good else pytest.raises(SystemExit):
                start_of(config)
    lines = [line for line in capsys.readouterr().out.splitlines() if "ERROR" in line]
    assert len(lines) == 2, lines
    assert all(f"data.jsonl:1: a text holds {beyond[-1]}, for which the model has no emb" in line for line in lines)
