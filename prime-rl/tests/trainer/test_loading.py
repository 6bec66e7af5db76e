"""A sharded model holds, bit for bit, the weights and buffers that Transformers loads from the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import nn

from prime_rl.configs.trainer import ModelConfig
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.transport.loading import full_tensor

SMALL: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = dict.fromkeys(
    ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8
)
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}

CONFIGS: dict[str, Callable[[], tf.PretrainedConfig]] = {
    "experts that are stacked": lambda: tf.Qwen3MoeConfig(**SMALL, **EXPERTS),
    "a bias in float32": lambda: tf.DeepseekV3Config(**SMALL | LATENT | ROUTED | EXPERTS | {"num_key_value_heads": 4}),
    "a tied head": lambda: tf.Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True),
    "matrices that are transposed": lambda: tf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4),
    "a padding row that is zeroed": lambda: tf.YoutuConfig(**SMALL | LATENT | {"num_key_value_heads": 4}),
    "rotary factors": lambda: tf.LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    ),
}


def save(config: tf.PretrainedConfig, folder: Path) -> None:
    model: Any = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_and_buffers_are_those_of_transformers(tmp_path: Path, mesh: Mesh, dtype: str) -> None:
    for kind, config in CONFIGS.items():
        folder = tmp_path / kind
        save(config(), folder)
        model = setup_model(ModelConfig(name=str(folder), attn="sdpa", optimization_dtype=dtype), mesh)
        expected = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, wanted in expected.named_parameters(remove_duplicate=False):
            assert full_tensor(parameters[name]).equal(wanted.to(getattr(torch, dtype))), f"{kind}: {name}"
        for name, buffer in expected.named_buffers():
            own = model.get_buffer(name)
            assert own.dtype == buffer.dtype, f"{kind}: {name}"
            assert own.equal(buffer), f"{kind}: {name}"


def test_pickled_weights_are_read_too(tmp_path: Path, mesh: Mesh) -> None:
    save(CONFIGS["experts that are stacked"](), tmp_path)
    before = setup_model(ModelConfig(name=str(tmp_path), attn="sdpa"), mesh)
    held = tmp_path / "model.safetensors"
    torch.save(load_file(held), tmp_path / "pytorch_model.bin")
    held.unlink()
    after = setup_model(ModelConfig(name=str(tmp_path), attn="sdpa"), mesh)
    others = dict(after.named_parameters())
    for name, wanted in before.named_parameters():
        assert full_tensor(others[name]).equal(full_tensor(wanted)), name


def test_a_stack_that_lacks_one_expert_is_named(tmp_path: Path, mesh: Mesh) -> None:
    save(CONFIGS["experts that are stacked"](), tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    del held["model.layers.1.mlp.experts.2.gate_proj.weight"]
    save_file(held, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 weight \(model\.layers\.1\.mlp\.experts\.gate_up_proj\)"):
        setup_model(ModelConfig(name=str(tmp_path), attn="sdpa"), mesh)
