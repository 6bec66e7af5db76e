"""A model's size is known from its config alone, or from the headers of its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from prime_rl.checks.memory import ModelShape
from prime_rl.checks.memory.shapes import FAMILIES
from prime_rl.checks.memory.training import _mlps, adapter_parameters
from prime_rl.configs.model import LoRAConfig
from prime_rl.trainer.model.blocks import decoder_blocks
from prime_rl.utils.errors import StartFault


def tiny(kind: str, **changes: Any) -> PretrainedConfig:
    sizes = {"hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 3, "vocab_size": 160}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(kind, **{**sizes, **heads, **tokens, **changes})


def parameters_of(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_config_gives_the_number_of_parameters(kind: str, tmp_path: Path) -> None:
    tied, untied = (tiny(kind, tie_word_embeddings=is_tied) for is_tied in (True, False))
    for config in (tied, untied):
        config.save_pretrained(tmp_path)
        assert ModelShape.of(str(tmp_path)).parameters == parameters_of(config)


EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.mark.parametrize(
    ("kind", "changes", "last", "is_gated"),
    [
        ("llama", {}, "mlp.down_proj.weight", True),
        ("phi3", {"num_key_value_heads": 1, "num_attention_heads": 2}, "mlp.down_proj.weight", True),
        ("lfm2", {"layer_types": ["conv"] * 3}, "feed_forward.w2.weight", True),
        ("lfm2", {"layer_types": ["full_attention"] * 3}, "feed_forward.w2.weight", True),
        ("gptj", {"n_embd": 96, "n_head": 4, "rotary_dim": 8, "n_layer": 1}, "mlp.fc_out.weight", False),
        ("gpt2", {"n_embd": 96, "n_head": 4, "n_layer": 1}, "mlp.c_proj.weight", False),
        ("opt", {"ffn_dim": 80, "word_embed_proj_dim": 96}, "fc2.weight", False),
        ("modernbert-decoder", {}, "mlp.Wo.weight", True),
        (
            "granitemoehybrid",
            {"num_local_experts": 0, "layer_types": ["mamba"] * 3, "mamba_n_heads": 4, "mamba_d_head": 48},
            "shared_mlp.output_linear.weight",
            True,
        ),
        ("nemotron", {}, "mlp.down_proj.weight", False),
        ("qwen3_moe", EXPERTS, "mlp.experts.down_proj", True),
        ("gpt_oss", EXPERTS, "mlp.experts.down_proj", True),
    ],
    ids=str,
)
def test_the_width_inside_of_an_mlp_is_that_of_its_last_layer(
    kind: str, changes: dict[str, Any], last: str, is_gated: bool
) -> None:
    config = tiny(kind, **changes)
    with torch.device("meta"):
        block = decoder_blocks(AutoModelForCausalLM.from_config(config))[0]
    weight, experts = block.get_parameter(last), last.count("experts")
    width = weight.numel() // 96 if not experts else 2 * weight[0].numel() // 96
    tensors = {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
    assert list(_mlps(ModelShape(config.to_dict() | {"hidden_size": 96}, {}), tensors)) == [(width, is_gated)]


def test_headers_of_weights_give_the_same_as_the_config(tmp_path: Path) -> None:
    config = tiny("qwen3_moe", num_experts=4, moe_intermediate_size=16)
    bare, whole = tmp_path / "bare", tmp_path / "whole"
    config.save_pretrained(bare)
    AutoModelForCausalLM.from_config(config).save_pretrained(whole)
    from_config, from_headers = ModelShape.of(str(bare)), ModelShape.of(str(whole))
    assert from_headers.parameters == from_config.parameters == parameters_of(config)
    assert len(from_headers.blocks) == 3


def test_fewer_layers_are_counted_as_fewer(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    shorter = tiny("llama", num_hidden_layers=2)
    assert ModelShape.of(str(tmp_path), num_layers=2).parameters == parameters_of(shorter)


def test_an_unknown_family_is_measured_by_its_weights(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "novel", "vocab_size": 10, **sizes}))
    with pytest.raises(StartFault, match="'novel' are estimated from their weights"):
        ModelShape.of(str(tmp_path))
    save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(32, 8)}, tmp_path / "model.safetensors")
    assert ModelShape.of(str(tmp_path)).parameters == 256


def test_a_model_that_is_not_here_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(StartFault, match=r"run `hf download someone/model config\.json` first"):
        ModelShape.of("someone/model")


def test_a_pattern_may_name_the_layers_whose_adapters_have_another_rank() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 128}
    tensors = {f"model.layers.{index}.self_attn.q_proj.weight": (32, 64) for index in range(3)}
    shape, lora = ModelShape(sizes, tensors), LoRAConfig(rank=4, target_modules=["q_proj"])
    of_layers = {"layers.1": 8, r"\.2\.self_attn": 2}
    ranks = lora.model_copy(update={"rank_pattern": of_layers})
    only_first = lora.model_copy(update={"target_modules": [r"layers\.0\..*q_proj"]})
    for config, expected in ((lora, [4, 4, 4]), (ranks, [4, 8, 2]), (only_first, [4, 0, 0])):
        placed = zip(shape.blocks, shape.places, strict=True)
        assert [adapter_parameters(block, config, place) for block, place in placed] == [96 * rank for rank in expected]
