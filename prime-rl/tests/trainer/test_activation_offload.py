from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from prime_rl.checks.memory import ModelShape
from prime_rl.checks.memory.training import activations_of
from prime_rl.configs.trainer import ActivationCheckpointConfig, ActivationOffloadingConfig, ModelConfig
from prime_rl.trainer.model.blocks import MIN_BYTES, ActivationOffload, OffloadedTensor, decoder_blocks, offloaded
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.scoring import score_tokens
from prime_rl.trainer.process.mesh import Mesh

CPU = torch.device("cpu")
TOKENS, PLACES = torch.arange(60)[None], torch.cat([torch.arange(25), torch.arange(35)])[None]


def loss_and_gradients(model) -> list[Tensor]:
    """Gradients of two consecutive micro-batches."""
    losses = []
    for _ in range(2):
        loss = score_tokens(model, TOKENS, PLACES, lambda hidden, logits_of: logits_of(hidden).logsumexp(-1).sum())
        loss.backward()
        losses.append(loss.detach())
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
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
