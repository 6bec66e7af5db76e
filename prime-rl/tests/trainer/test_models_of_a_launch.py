"""Several processes build the model that one process loads: each reads its own slices of the files."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
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
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from prime_rl.inference.embedded.engine.weights import load_weights, read_weights
from prime_rl.launch import reserved_ports
from prime_rl.run.paths import RunPaths
from prime_rl.transport.weights import WeightGroup

ENGINES = 2
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


def with_expert_rows(directory: Path) -> None:
    """The files hold its experts one by one, and the model all of a layer in one tensor."""
    sizes = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **sizes, head_dim=16)).save_pretrained(directory)


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
    *(with_old_names, with_a_head_of_its_own, with_numbers, with_expert_rows),
    *(with_a_frozen_bias, with_a_router_in_float32, with_a_bias_in_float32),
)


def rename(directory: Path, new_names: Mapping[str, str]) -> None:
    weights = load_file(directory / "model.safetensors")
    save({new_names.get(name, name): weight for name, weight in weights.items()}, directory)


def save(weights: dict[str, torch.Tensor], directory: Path) -> None:
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


Received = list[dict[str, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def launches(directory: Path) -> tuple[dict[int, dict[str, dict[str, Any]]], Received]:
    """What `models_of_a_launch.py` says of each model, by number of processes, and what it sends to engines."""
    for make in MODELS:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            make(directory / make.__name__)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = {}
    with reserved_ports(1) as (port,), ThreadPoolExecutor(ENGINES) as engines:
        for processes, launcher in ((1, []), (2, torchrun)):
            file = directory / f"{processes}.pt"
            models = [directory / make.__name__ for make in MODELS]
            command = [sys.executable, *launcher, SCRIPT, file, str(port), *models]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            received = [engines.submit(receive, port, rank + 1) for rank in range(ENGINES if processes > 1 else 0)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            found[processes] = torch.load(file, weights_only=True)
        return found, [each.result() for each in received]


def receive(port: int, rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """All models that an engine receives, by name."""
    group = WeightGroup(("127.0.0.1", port), rank, ENGINES + 1, torch.device("cpu"), timeout_s=600)
    names = (make.__name__ for make in MODELS)
    return {name: {key: each.clone() for key, each in group.receive(version)} for version, name in enumerate(names)}


@pytest.fixture
def results(launches: tuple[dict[int, dict[str, dict[str, Any]]], Received]) -> dict[int, dict[str, dict[str, Any]]]:
    return launches[0]


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


@pytest.mark.parametrize("model", [make.__name__ for make in MODELS])
def test_two_processes_that_share_a_model_give_two_engines_all_of_its_weights(
    model: str, launches: tuple[dict[int, dict[str, dict[str, Any]]], Received], directory: Path
) -> None:
    version = RunPaths(directory / model).orchestrator.broadcast(1)
    index = json.loads((version / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2, "each process writes what it keeps"
    expected = AutoModelForCausalLM.from_pretrained(directory / model, dtype=torch.bfloat16)
    for weights in (read_weights(version), *(each[model] for each in launches[1])):
        assert weights.keys() == index["weight_map"].keys()
        engine = copy.deepcopy(expected)
        for parameter in engine.parameters():
            parameter.data.zero_()
        load_weights(engine, weights, version)
        held = engine.state_dict()
        assert all(torch.equal(value, held[name]) for name, value in expected.state_dict().items())


def test_an_export_has_the_names_of_the_files_that_were_loaded(results: dict[int, dict[str, dict[str, Any]]]) -> None:
    assert "embed_out.weight" in results[2]["with_old_names"]["weights"]


def test_what_a_model_declares_as_frozen_is_not_trained(results: dict[int, dict[str, dict[str, Any]]]) -> None:
    trained = results[1]["with_a_frozen_bias"]["trained"]
    assert "model.layers.1.mlp.router.gate.weight" in trained
    assert "model.layers.1.mlp.expert_bias" not in trained
