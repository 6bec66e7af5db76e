from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from prime_rl.checks.memory import ModelShape
from prime_rl.checks.memory.training import activations_of
from prime_rl.configs.trainer import ActivationCheckpointConfig, ActivationOffloadingConfig, ModelConfig
from prime_rl.trainer.model.blocks import MIN_BYTES, ActivationOffload, OffloadedTensor, decoder_blocks, offloaded
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.scoring import score_tokens
from prime_rl.trainer.process.mesh import Mesh

SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    "vocab_size": 100,
    "pad_token_id": 0,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "layer_types": ["full_attention", "full_attention"],
}
CPU = torch.device("cpu")
TOKENS, PLACES = torch.arange(60)[None], torch.cat([torch.arange(25), torch.arange(35)])[None]


def loss_and_gradients(model) -> list[Tensor]:
    """Gradients of two consecutive micro-batches."""
    losses = []
    for _ in range(2):
        loss = score_tokens(model, TOKENS, PLACES, lambda hidden, logits_of: logits_of(hidden).logsumexp(-1).sum())
        loss.backward()
        losses.append(loss.detach())
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return [*losses, *gradients]


@pytest.mark.parametrize("max_inflight", [1, 2, 50])
@pytest.mark.parametrize("ac", [None, ActivationCheckpointConfig(freq=1), ActivationCheckpointConfig(freq=2)])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_offloaded_activations_give_bit_identical_gradients(
    tiny_model_dir: Path, mesh: Mesh, ac, max_inflight: int, compute_dtype: str
) -> None:
    config = ModelConfig(name=str(tiny_model_dir), attn="sdpa", ac=ac, compute_dtype=compute_dtype)
    model = setup_model(config, mesh)
    expected = loss_and_gradients(model)
    offload = ActivationOffload(ActivationOffloadingConfig(max_inflight_activations=max_inflight), CPU)
    for block in decoder_blocks(model):
        block.forward = offloaded(block.forward, offload)
    assert all(torch.equal(*pair) for pair in zip(loss_and_gradients(model), expected, strict=True))
    assert offload.moved_bytes > 0


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_as_few_blocks_are_recomputed_as_the_budget_takes_and_gradients_stay_the_same_bits(
    tiny_model_dir: Path, mesh: Mesh, compute_dtype: str
) -> None:
    settings = {"name": str(tiny_model_dir), "attn": "sdpa", "compute_dtype": compute_dtype}
    first, *others = activations_of(ModelShape.of(str(tiny_model_dir)), ModelConfig(**settings), "cpu")
    # One sequence has a row of 35 places, and there are two.
    kept_bytes = [70 * sum(block.saved for block in others) + 70 * first.input, 70 * first.saved]
    expected = loss_and_gradients(setup_model(ModelConfig(**settings), mesh))
    saved = []
    for budget_bytes in (kept_bytes[0] + kept_bytes[1], kept_bytes[0], 1):
        config = ModelConfig(**settings, ac=ActivationCheckpointConfig(memory_gib=budget_bytes / 2**30))
        model = setup_model(config, mesh)
        assert all(torch.equal(*pair) for pair in zip(loss_and_gradients(model), expected, strict=True))
        offload = ActivationOffload(ActivationOffloadingConfig(), CPU)
        for block in decoder_blocks(model):
            block.forward = offloaded(block.forward, offload)
        loss_and_gradients(model)
        saved.append(offload.moved_bytes)
    assert saved[0] > saved[1] > saved[2]


def test_checkpointed_blocks_move_only_their_input(tiny_model_dir: Path, mesh: Mesh) -> None:
    model = setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa", ac=ActivationCheckpointConfig()), mesh)
    offload = ActivationOffload(ActivationOffloadingConfig(), CPU)
    for block in decoder_blocks(model):
        block.forward = offloaded(block.forward, offload)
    loss_and_gradients(model)
    hidden_bytes = TOKENS.shape[1] * 64 * 4
    assert offload.moved_bytes == 2 * len(decoder_blocks(model)) * hidden_bytes


def test_only_the_newest_activations_stay_on_the_device() -> None:
    offload = ActivationOffload(ActivationOffloadingConfig(max_inflight_activations=2), CPU)
    states = torch.ones(MIN_BYTES, requires_grad=True)
    with offload.hooks():
        for _ in range(6):
            states = states.exp()
    stored, node = [], states.grad_fn
    while hasattr(node, "_raw_saved_result"):
        stored.append(node._raw_saved_result.data)
        node = node.next_functions[0][0]
    assert all(isinstance(one, OffloadedTensor) for one in stored)
    assert [one.on_device is not None for one in stored] == [True, True, False, False, False, False]


def test_small_tensors_and_parameters_are_not_moved() -> None:
    offload = ActivationOffload(ActivationOffloadingConfig(), CPU)
    small = torch.ones(MIN_BYTES // 4 - 1, requires_grad=True)
    linear = torch.nn.Linear(64, 64, bias=False)
    with offload.hooks():
        small.exp().sum()
        linear(torch.ones(2, 64, requires_grad=True)).sum()
    assert offload.moved_bytes == 0


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("qwen3", {"ac": {}}),
        ("qwen3", {"ac": {"freq": 2}, "lora": {"rank": 4}}),
        ("qwen3", {"quantization": "nf4", "lora": {"rank": 4}}),
        ("bloom", {"ac": {}}),  # its MLP adds the residual itself
        ("gpt2", {}),
        ("phi3", {}),
        ("lfm2", {"ac": {}}),
    ],
    ids=str,
)
def test_chunks_of_an_mlp_have_the_loss_and_the_gradients_of_the_whole_row(
    tmp_path: Path, mesh: Mesh, family: str, settings: dict[str, Any]
) -> None:
    if "quantization" in settings:
        pytest.importorskip("bitsandbytes", reason="needs the extra quantization")
    config = AutoConfig.for_model(family, **SIZES)
    config.save_pretrained(tmp_path)
    common = {"name": str(tmp_path), "attn": "sdpa", "debug": {"random_init": True}, **settings}
    expected = loss_and_gradients(setup_model(ModelConfig(**common), mesh))
    chunked = loss_and_gradients(setup_model(ModelConfig(**common, mlp_chunk_tokens=16), mesh))
    torch.testing.assert_close(chunked, expected, rtol=1e-5, atol=1e-6)


def test_a_chunk_that_is_computed_again_drops_what_it_dropped_before(tiny_model_dir: Path, mesh: Mesh) -> None:
    lora = {"rank": 4, "dropout": 0.5, "target_modules": ["down_proj"]}
    common = {"name": str(tiny_model_dir), "attn": "sdpa", "lora": lora}
    found = []
    for chunks in ({}, {"mlp_chunk_tokens": 4096}):  # one chunk draws as a whole row does
        model = setup_model(ModelConfig(**common, **chunks), mesh, has_dropout=True)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.fill_(0.01) if name.endswith("lora.B") else None
        torch.manual_seed(0)
        found.append(loss_and_gradients(model))
    torch.testing.assert_close(*found)
    assert found[0][0] != found[0][1]
