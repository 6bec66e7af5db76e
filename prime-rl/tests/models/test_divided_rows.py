"""Processes that divide rows (`model.cp`), layers (`model.tp`) or experts (`model.ep`) have the loss and gradient of
those that do not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_cases import Case, save_tiny_model
from torch import Tensor

SCRIPT = Path(__file__).with_name("divided_rows_of_a_launch.py")
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
Found = dict[tuple[str, str], tuple[float, Tensor, int]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Loss, gradient and fingerprint by model and mesh, from one launch of four processes."""
    directory = tmp_path_factory.mktemp("divided")
    sizes: dict[str, dict[str, dict[str, int]]] = {}
    for name, (case, meshes) in MODELS.items():
        save_tiny_model(case, directory / name)
        axes = {mesh: re.findall(r"([a-z_]+)(\d)", mesh) for mesh in meshes.split()}
        sizes[name] = {mesh: {axis: int(size) for axis, size in found} for mesh, found in axes.items()}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launcher, SCRIPT, directory, json.dumps(sizes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded: Found = torch.load(directory / "found.pt")
    return loaded


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
