from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from prime_rl.configs.trainer import AdamWConfig, ModelConfig, MuonConfig
from prime_rl.trainer.checkpoints.weights import gather_weights
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.scoring import score_tokens
from prime_rl.trainer.optim.optimizer import clip_gradients, setup_optimizer
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.parallel_dims import Mesh

TOKENS, PLACES = torch.arange(30)[None], torch.cat([torch.arange(12), torch.arange(18)])[None]


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of four experts, two of them active per token."""
    directory = tmp_path_factory.mktemp("moe")
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


def config_of(directory: Path, **fields) -> ModelConfig:
    return ModelConfig(name=str(directory), attn="sdpa", **fields)


def loss_of(model) -> torch.Tensor:
    return score_tokens(model, TOKENS, PLACES, lambda hidden, logits_of: logits_of(hidden).logsumexp(-1).mean())


def test_grouped_and_sequential_experts_give_the_same_gradient(moe_dir: Path, mesh: Mesh) -> None:
    results, kernels = [], []
    for grouped in (True, False):
        model = setup_model(config_of(moe_dir, moe_use_grouped_mm=grouped), mesh)
        kernels.append(model.config._experts_implementation)
        loss = loss_of(model)
        loss.backward()
        results.append([loss.detach(), *(parameter.grad.full_tensor() for parameter in model.parameters())])
    assert kernels == ["grouped_mm", "eager"]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("optim", [AdamWConfig(lr=1e-2), MuonConfig(lr=1e-2)], ids=["adamw", "muon"])
def test_frozen_routers_do_not_change_while_the_rest_trains(moe_dir: Path, mesh: Mesh, optim) -> None:
    model = setup_model(config_of(moe_dir, freeze_moe_router=True), mesh)
    before = gather_weights(model, torch.float32)
    optimizer = setup_optimizer(optim, model)
    loss_of(model).backward()
    assert clip_gradients(model, 1.0) > 0
    optimizer.step()
    after = gather_weights(model, torch.float32)
    routers = {name for name in after if name.endswith(".mlp.gate.weight")}
    assert routers == {f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)}
    assert {name for name in after if torch.equal(after[name], before[name])} == routers


def test_routers_of_a_dense_model_cannot_be_frozen(tiny_model_dir: Path, mesh: Mesh) -> None:
    with pytest.raises(ModelError, match="freeze_moe_router: Qwen3ForCausalLM has no router"):
        setup_model(config_of(tiny_model_dir, freeze_moe_router=True), mesh)
