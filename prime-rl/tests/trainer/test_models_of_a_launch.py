"""Several processes build the model that one process loads: each reads its own slices of the files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    ApertusConfig,
    ApertusForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SCRIPT = Path(__file__).with_name("models_of_a_launch.py")
SMALL: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def with_old_names(directory: Path) -> None:
    """As GPT-NeoX and Pythia are on the hub. Transformers renames the head when it loads them."""
    GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)).save_pretrained(directory)
    rename(directory, {"lm_head.weight": "embed_out.weight"})


def with_a_head_of_its_own(directory: Path) -> None:
    """The config ties the head to the embeddings, and the file holds another head: Transformers unties them."""
    Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True)).save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    save(weights | {"lm_head.weight": torch.randn(64, 32)}, directory)


def with_numbers(directory: Path) -> None:
    """Its activations have buffers that are a single number."""
    ApertusForCausalLM(ApertusConfig(**SMALL)).save_pretrained(directory)


def with_a_frozen_bias(directory: Path) -> None:
    """Its code declares the bias of its router as frozen."""
    sizes = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1}
    AfmoeForCausalLM(AfmoeConfig(**SMALL, **sizes, head_dim=16)).save_pretrained(directory)


def with_a_router_in_float32(directory: Path) -> None:
    """Its code builds the router in float32, whatever the model's dtype."""
    sizes = {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 1}
    Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**SMALL, **sizes)).save_pretrained(directory)


def with_a_bias_in_float32(directory: Path) -> None:
    """As on the hub, where all other weights are in bfloat16."""
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    config = DeepseekV3Config(**SMALL, **experts, **ranks, moe_intermediate_size=16, first_k_dense_replace=1)
    model = DeepseekV3ForCausalLM(config).to(torch.bfloat16)
    # Neighbours in bfloat16 are 0.03 apart here.
    model.model.layers[1].mlp.gate.e_score_correction_bias = torch.tensor([4.01, 4.02, 4.03, 4.04])
    model.save_pretrained(directory)


MODELS: tuple[Callable[[Path], None], ...] = (
    *(with_old_names, with_a_head_of_its_own, with_numbers),
    *(with_a_frozen_bias, with_a_router_in_float32, with_a_bias_in_float32),
)


def rename(directory: Path, new_names: Mapping[str, str]) -> None:
    weights = load_file(directory / "model.safetensors")
    save({new_names.get(name, name): weight for name, weight in weights.items()}, directory)


def save(weights: dict[str, torch.Tensor], directory: Path) -> None:
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, dict[str, Any]]]:
    """What `models_of_a_launch.py` says of each model, by number of processes."""
    directory = tmp_path_factory.mktemp("models")
    for make in MODELS:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            make(directory / make.__name__)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = {}
    for processes, launcher in ((1, []), (2, torchrun)):
        file = directory / f"{processes}.pt"
        command = [sys.executable, *launcher, SCRIPT, file, *(directory / make.__name__ for make in MODELS)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found[processes] = torch.load(file, weights_only=True)
    return found


@pytest.mark.parametrize("model", [make.__name__ for make in MODELS])
def test_two_processes_build_train_and_export_the_model_of_one(
    model: str, results: dict[int, dict[str, dict[str, Any]]]
) -> None:
    alone, together = (results[processes][model] for processes in (1, 2))
    assert together["trained"] == alone["trained"]
    assert together["logprob"] == pytest.approx(alone["logprob"], rel=1e-6)
    own, expected = together["weights"], alone["weights"]
    assert {name: weight.dtype for name, weight in own.items()} == {n: w.dtype for n, w in expected.items()}
    assert all(torch.equal(weight, own[name]) for name, weight in expected.items())


def test_an_export_has_the_names_of_the_files_that_were_loaded(results: dict[int, dict[str, dict[str, Any]]]) -> None:
    assert "embed_out.weight" in results[2]["with_old_names"]["weights"]


def test_what_a_model_declares_as_frozen_is_not_trained(results: dict[int, dict[str, dict[str, Any]]]) -> None:
    trained = results[1]["with_a_frozen_bias"]["trained"]
    assert "model.layers.1.mlp.router.gate.weight" in trained
    assert "model.layers.1.mlp.expert_bias" not in trained
