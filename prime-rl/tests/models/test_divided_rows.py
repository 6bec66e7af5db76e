"""Processes that divide rows (`model.cp`), layers (`model.tp`) or experts (`model.ep`) have the loss and gradient of
those that do not."""

from __future__ import annotations

import pytest
import torch
from divided_rows_of_a_launch import Found, launched
from model_cases import Case

ATTENDING = {"layer_types": ["linear_attention", "full_attention"]}
MODELS = {
    "two key-value heads": (Case("llama"), "cp2 tp2 cp4 dp_replicate2-cp2 cp2-tp2 dp_replicate2-tp2"),
    "adapter": (Case("qwen3"), "cp2 tp2"),
    "dropout, adapter": (Case("qwen3"), "tp2"),
    "experts, dropout, adapter": (Case("qwen3_moe"), "tp2"),
    "experts": (Case("qwen3_moe"), "cp2 tp2 ep2 dp_replicate2-ep2 cp2-ep4 tp2-ep4"),
    "experts, adapter": (Case("qwen3_moe"), "cp2 tp2 ep4 tp2-ep4"),
    "experts, balanced": (Case("qwen3_moe"), "cp2 tp2 ep2 cp2-ep4"),
    "experts, replayed": (Case("qwen3_moe"), "cp2 tp2 tp2-ep4"),
    "two experts": (Case("qwen3_moe", {"num_experts": 2, "num_experts_per_tok": 1}), "ep2"),
    "latent attention": (Case("deepseek_v3"), "cp2 tp2 ep4"),
    "latent attention, adapter": (Case("deepseek_v2"), "cp2 tp2"),
    "windows": (Case("gemma3_text"), "cp2 tp2"),
    "short convolutions": (Case("lfm2"), "cp4"),
    "whole heads": (Case("olmo2"), "cp2 tp2"),
    "biases": (Case("gpt_neox"), "cp2 tp2"),
    "gated delta rule": (Case("qwen3_5_text", ATTENDING | {"linear_num_key_heads": 2}), "cp2 tp2 cp4 cp2-tp2"),
    "gated delta rule, adapter": (Case("qwen3_next", ATTENDING), "cp4 cp2-ep4"),
    "state space": (Case("granitemoehybrid"), "cp2"),
    "state space of groups": (Case("nemotron_h", {"n_groups": 2}), "cp4"),
    "state space, adapter": (Case("bamba", {"mamba_n_groups": 2}), "cp2"),
    "a state in whole rows": (Case("granitemoehybrid", {"mamba_n_heads": 2, "mamba_d_head": 32}), "cp4"),
}
"""Models, and the meshes of four processes that divide them; `dp_shard` is what remains."""
DIVISIONS = [(model, mesh) for model, (_, meshes) in MODELS.items() for mesh in meshes.split()]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """From one launch of four processes."""
    return launched(tmp_path_factory.mktemp("divided"), MODELS)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), DIVISIONS)
def test_loss_and_gradient_are_those_of_whole_rows(found: Found, model: str, mesh: str) -> None:
    expected_loss, expected, expected_fingerprint = found[model, "whole rows"]
    loss, gradient, fingerprint = found[model, mesh]
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert expected.norm() > 0.01
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5 * float(expected.norm()))
    assert fingerprint == expected_fingerprint
    assert (fingerprint != 0) == model.endswith("adapter")
