"""Processes that divide rows (`model.cp`) or layers (`model.tp`) have the loss and gradient of those that do not."""

from __future__ import annotations

import os
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
    "two key-value heads": Case("llama"),
    "adapter": Case("qwen3"),
    "experts": Case("qwen3_moe"),
    "experts, adapter": Case("qwen3_moe"),
    "experts, replayed": Case("qwen3_moe"),
    "latent attention": Case("deepseek_v3"),
    "latent attention, adapter": Case("deepseek_v2"),
    "windows": Case("gemma3_text"),
    "short convolutions": Case("lfm2"),
    "whole heads": Case("olmo2"),
    "biases": Case("gpt_neox"),
    "gated delta rule": Case("qwen3_5_text", ATTENDING),
    "state space": Case("granitemoehybrid"),
}
DIVISIONS = [(model, "dp_shard 2, cp 2") for model in MODELS]
DIVISIONS += [(model, "dp_shard 2, tp 2") for model in MODELS if model not in ("short convolutions", "state space")]
MORE_MESHES = ("cp 4", "dp_replicate 2, cp 2", "cp 2, tp 2", "dp_replicate 2, tp 2")
DIVISIONS += [("two key-value heads", mesh) for mesh in MORE_MESHES]
Found = dict[tuple[str, str], tuple[float, Tensor, int]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Loss, gradient and fingerprint by model and mesh, from one launch of four processes."""
    directory = tmp_path_factory.mktemp("divided")
    for name, case in MODELS.items():
        save_tiny_model(case, directory / name)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launcher, SCRIPT, directory / "found.pt", *(directory / name for name in MODELS)]
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
