from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from prime_rl.configs.trainer import AdamWConfig, ConstantSchedulerConfig, DebugModelConfig, ModelConfig, MuonConfig
from prime_rl.trainer.checkpoints.state import TrainedModel
from prime_rl.trainer.checkpoints.weights import gather_weights
from prime_rl.trainer.model.balance import Balance
from prime_rl.trainer.model.blocks import accumulated
from prime_rl.trainer.model.build import setup_frozen, setup_model
from prime_rl.trainer.model.scoring import score_tokens
from prime_rl.trainer.optim.optimizer import clip_gradients, setup_optimizer
from prime_rl.trainer.optim.scheduler import setup_scheduler
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.rl.step import Reference
from prime_rl.transport.loading import full_tensor
from prime_rl.transport.routing import RouterLoad, Routers, Routing

SMALL = {
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
TOKENS, PLACES = torch.arange(30)[None], torch.cat([torch.arange(12), torch.arange(18)])[None]


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of four experts, two of them active per token."""
    directory = tmp_path_factory.mktemp("moe")
    config = Qwen3MoeConfig(
        **SMALL,
        vocab_size=64,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def biased_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A router with a bias in float32, as on the hub, where all other weights are in bfloat16."""
    directory = tmp_path_factory.mktemp("biased")
    config = DeepseekV3Config(
        **SMALL,
        vocab_size=128,
        intermediate_size=32,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = DeepseekV3ForCausalLM(config).to(torch.bfloat16)
    # Neighbours in bfloat16 are 0.03 apart here.
    model.model.layers[1].mlp.gate.e_score_correction_bias = torch.tensor([4.01, 4.02, 4.03, 4.04])
    model.save_pretrained(directory)
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


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_a_router_bias_that_is_published_in_float32_is_exported_so(biased_dir: Path, mesh: Mesh, master: str) -> None:
    exported = gather_weights(setup_model(config_of(biased_dir, optimization_dtype=master), mesh), torch.bfloat16)
    bias = exported["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(bias, torch.tensor([4.01, 4.02, 4.03, 4.04]))
    assert exported["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16


@pytest.fixture
def ernie_dir(tmp_path: Path) -> Path:
    """Transformers loads its router in float32."""
    config = Ernie4_5_MoeConfig(
        **SMALL,
        vocab_size=64,
        intermediate_size=32,
        moe_num_experts=4,
        moe_k=2,
        moe_layer_start_index=1,
        moe_layer_end_index=1,
    )
    model = Ernie4_5_MoeForCausalLM(config)
    router = model.model.layers[1].mlp.gate.weight
    router.data = torch.linspace(-1, 1, router.numel()).view_as(router)
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("random_init", [False, True], ids=["loaded", "random"])
def test_routers_that_transformers_has_in_float32_train_in_bfloat16(
    ernie_dir: Path, mesh: Mesh, random_init: bool
) -> None:
    debug = DebugModelConfig(random_init=random_init)
    model = setup_model(config_of(ernie_dir, optimization_dtype="bfloat16", debug=debug), mesh)
    loss_of(model).backward()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_frozen_routers_under_adapters_are_exported_as_they_were(ernie_dir: Path, mesh: Mesh) -> None:
    config = config_of(ernie_dir, compute_dtype="bfloat16", lora={"target_modules": ["q_proj"]})
    model = setup_model(config, mesh)
    loss_of(model).backward()
    exported = gather_weights(model, torch.bfloat16)
    published = load_file(ernie_dir / "model.safetensors")
    name = "model.layers.1.mlp.gate.weight"
    assert torch.equal(exported[name], published[name])
    assert model.get_parameter("model.layers.1.self_attn.k_proj.weight").dtype == torch.bfloat16


def test_the_load_of_experts_is_that_of_the_tokens_that_train(biased_dir: Path, mesh: Mesh) -> None:
    settings = {"router_bias_update_rate": 0.001, "ac": {"freq": 1}}  # recomputed blocks count once
    model = setup_model(config_of(biased_dir, **settings), mesh)
    balance = Balance(model, 0.001, mesh.process)
    gate = model.model.layers[1].mlp.gate
    # Two sequences with a common start, then one without a trained token.
    tokens = [list(range(12)), [*range(6), *range(30, 42)], [7] * 9]
    places = torch.cat([torch.arange(len(each)) for each in tokens])[None]
    ids = torch.tensor([token for each in tokens for token in each])[None]
    trained = torch.tensor([4, 9, 20])
    score_tokens(
        model, ids, places, lambda hidden, logits_of: logits_of(hidden).logsumexp(-1).mean(), trained
    ).backward()

    reference = DeepseekV3ForCausalLM.from_pretrained(biased_dir, dtype=torch.float32)
    routed: list[tuple[torch.Tensor, ...]] = []
    reference.model.layers[1].mlp.gate.register_forward_hook(lambda module, inputs, outputs: routed.append(outputs))
    with torch.no_grad():
        for each in tokens[:2]:
            reference(torch.tensor([each]))
    logits, _, chosen = map(torch.cat, zip(*routed, strict=True))
    load = torch.bincount(chosen.flatten(), minlength=4).double()
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    before = gate.e_score_correction_bias.clone()
    assert balance.step() == {
        "experts/max_load/mean": pytest.approx(float(load.max() / load.mean())),
        "experts/max_load/max": pytest.approx(float(load.max() / load.mean())),
        "experts/unused": float((load == 0).double().mean()),
        "experts/router_entropy": pytest.approx(float(entropy), rel=1e-4),
    }
    assert balance.step() == {}
    moved = before + 0.001 * torch.sign(load.mean() - load)
    torch.testing.assert_close(gate.e_score_correction_bias, moved.float())
    optimizer = setup_optimizer(AdamWConfig(lr=1e-3), model)
    saved = TrainedModel(model, optimizer, setup_scheduler(ConstantSchedulerConfig(), optimizer, 1)).tensors()["model"]
    for state in (saved, gather_weights(model, torch.bfloat16)):
        torch.testing.assert_close(state["model.layers.1.mlp.gate.e_score_correction_bias"], moved.float())


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_auxiliary_loss_and_its_gradient_are_those_of_transformers(
    moe_dir: Path, mesh: Mesh, recomputed: bool
) -> None:
    """Over the tokens of two sequences in one row, and over two rows as the mean of both."""
    settings = {"router_aux_loss_coef": 0.5} | ({"ac": {"freq": 1}} if recomputed else {})
    model = setup_model(config_of(moe_dir, **settings), mesh)
    balance = Balance(model, 0.0, mesh.process)
    rows = [[list(range(12)), list(range(20, 38))], [[5, 9, 5, 9, 5, 9, 7]]]
    for row in accumulated(model, rows, mesh.process):
        ids = torch.tensor([token for each in row for token in each])[None]
        places = torch.cat([torch.arange(len(each)) for each in row])[None]
        score_tokens(
            model, ids, places, lambda hidden, logits_of: logits_of(hidden).logsumexp(-1).sum() / 50
        ).backward()

    reference = Qwen3MoeForCausalLM.from_pretrained(moe_dir, dtype=torch.float32)
    losses = []
    for row in rows:
        longest = max(map(len, row))
        ids = torch.tensor([[*each, *[0] * (longest - len(each))] for each in row])
        mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in row])
        outputs = reference(ids, attention_mask=mask, output_router_logits=True)
        losses.append(outputs.aux_loss.item())
        ((outputs.logits.logsumexp(-1) * mask).sum() / 50 + 0.5 * outputs.aux_loss / 2).backward()
    assert balance.step()["experts/aux_loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert any(grad.norm() > 1e-3 for name, grad in expected.items() if name.endswith("mlp.gate.weight"))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full_tensor(parameter.grad), expected[name], rtol=1e-4, atol=1e-5)


class ScorelessRouter(nn.Module):
    """Returns what it chose, and not its scores."""

    num_experts, top_k = 4, 2

    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.topk(scores, self.top_k))


def test_a_router_that_does_not_return_its_scores_is_counted() -> None:
    model = nn.Sequential(ScorelessRouter())
    routers = Routers(model)
    with routers.on(Routing(weights_N=torch.tensor([1.0, 2.0, 0.0]))):
        model(torch.tensor([[4.0, 3, 2, 1], [1, 2, 3, 4], [1, 4, 4, 1]]))
    counts, entropies = routers.load.take()
    assert counts.tolist() == [[1, 1, 2, 2]]
    assert entropies.tolist() == []


def test_the_entropy_of_a_router_is_that_of_its_probabilities_whichever_it_returns() -> None:
    """Gemma 4 returns probabilities, and the others what these are the softmax of."""
    logits, weights = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.ones(5)
    expected = torch.distributions.Categorical(logits=logits).entropy().sum()
    for scores in (logits, logits.softmax(-1)):
        load = RouterLoad()
        load.add(0, 4, logits.topk(2).indices, scores, weights)
        torch.testing.assert_close(load.take()[1].float(), expected[None])


def test_a_reference_that_is_reset_takes_the_biases(biased_dir: Path, mesh: Mesh) -> None:
    model, frozen = setup_model(config_of(biased_dir), mesh), setup_frozen(config_of(biased_dir), mesh)
    own, other = (each.model.layers[1].mlp.gate.e_score_correction_bias for each in (model, frozen))
    own += 1
    assert Reference(frozen, is_trained=False, reset_every=2).reset_if_due(model, 2)
    assert torch.equal(own, other)


def test_a_bias_that_cannot_be_moved_is_refused(moe_dir: Path, mesh: Mesh) -> None:
    model = setup_model(config_of(moe_dir), mesh)
    with pytest.raises(ModelError, match="router_bias_update_rate: the routers of Qwen3MoeForCausalLM have no bias"):
        Balance(model, 0.001, mesh.process)
    for settings, fault in {"compile": "with \\[compile\\]", "lora": "with \\[lora\\]"}.items():
        with pytest.raises(ValidationError, match=fault):
            config_of(moe_dir, router_bias_update_rate=0.001, **{settings: {}})
