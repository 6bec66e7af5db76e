"""Kept gradients, compared with autograd's gradients of the plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from prime_rl.configs.trainer import AdamWConfig, ModelConfig
from prime_rl.trainer.kernels.heads import CHUNK_SIZES, ChunkSizes
from prime_rl.trainer.model.blocks import accumulated
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.scoring import cross_entropy_sum, score_tokens
from prime_rl.trainer.optim.optimizer import setup_optimizer
from prime_rl.trainer.process.mesh import Mesh

VOCAB = 128
ROWS = [torch.arange(length)[None] % VOCAB for length in (40, 25, 90)]


def gradient_of(
    model: nn.Module, rows: list[Tensor], mesh: Mesh, limits: ChunkSizes = CHUNK_SIZES
) -> dict[str, Tensor]:
    for row in accumulated(model, rows, mesh.process):
        targets = row[0].roll(-1)
        score_tokens(
            model, row, row, lambda hidden, logits_of, t=targets: cross_entropy_sum(hidden, t, logits_of, VOCAB, limits)
        ).backward()
    return {name: parameter.grad.to_local().clone() for name, parameter in model.named_parameters()}


def plain_gradient_of(config: ModelConfig, rows: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of the model without FSDP and without our kernels."""
    model = AutoModelForCausalLM.from_pretrained(config.name, dtype=getattr(torch, config.compute_dtype))
    total: dict[str, Tensor] = {}
    for row in rows:
        logits = model(input_ids=row, use_cache=False).logits[0].float()
        nn.functional.cross_entropy(logits, row[0].roll(-1), reduction="sum").backward()
        for name, parameter in model.named_parameters():
            total[name] = total.get(name, 0.0) + parameter.grad.float()
        model.zero_grad()
    return total


@pytest.fixture(params=["float32", "bfloat16"])
def config(request: pytest.FixtureRequest, tiny_model_dir: Path) -> ModelConfig:
    return ModelConfig(name=str(tiny_model_dir), attn="sdpa", compute_dtype=request.param)


@pytest.mark.parametrize("most_logits", [2**25, 16 * VOCAB], ids=["head in one part", "head in parts"])
def test_kept_gradients_equal_those_of_the_plain_model(config: ModelConfig, mesh: Mesh, most_logits: int) -> None:
    kept = gradient_of(setup_model(config, mesh), ROWS, mesh, ChunkSizes(logits=most_logits, vocab_chunk=48))
    tolerance = 1e-5 if config.compute_dtype == "float32" else 2e-2
    for name, expected in plain_gradient_of(config, ROWS).items():
        torch.testing.assert_close(
            kept[name], expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()), msg=name
        )


def test_kept_gradients_stay_in_place_and_restart_after_zero_grad(config: ModelConfig, mesh: Mesh) -> None:
    model = setup_model(config, mesh)
    first = gradient_of(model, ROWS, mesh)
    places = [parameter.grad.to_local().data_ptr() for parameter in model.parameters()]
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    again = gradient_of(model, ROWS, mesh)
    assert [parameter.grad.to_local().data_ptr() for parameter in model.parameters()] == places
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_the_padding_token_has_no_gradient(config: ModelConfig, mesh: Mesh) -> None:
    model = setup_model(config, mesh)
    embedding = model.get_input_embeddings()
    embedding.padding_idx = 7
    model.unshard()
    embedding(torch.tensor([[3, 7, 7]])).sum().backward()
    model.reshard()
    gradient = embedding.weight.grad.to_local()
    assert gradient[3].abs().sum() > 0
    assert gradient[7].abs().sum() == 0


def test_states_created_before_the_first_update_equal_adamws(config: ModelConfig, mesh: Mesh) -> None:
    weights = []
    for is_ours in (True, False):
        model = setup_model(config, mesh)
        optimizer = setup_optimizer(AdamWConfig(lr=1e-2), model)
        if not is_ours:
            optimizer.state.clear()
        for _ in range(2):
            gradient_of(model, ROWS, mesh)
            optimizer.step()
            optimizer.zero_grad()
        weights.append([parameter.to_local().clone() for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
