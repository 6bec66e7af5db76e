"""Loss and gradient do not depend on how samples are packed and divided among processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("gradients_of_a_batch.py")


@pytest.fixture(scope="module")
def results(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Results of `gradients_of_a_batch.py` by number of processes."""
    directory = tmp_path_factory.mktemp("results")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = {}
    for processes, launcher in ((1, []), (2, torchrun)):
        command = [sys.executable, *launcher, SCRIPT, tiny_model_dir, directory / f"{processes}.pt"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found[processes] = torch.load(directory / f"{processes}.pt")
    return found


@pytest.mark.parametrize("trainer", ["sft", "distilled", "rl"])
@pytest.mark.parametrize(
    ("processes", "division"),
    [
        pytest.param(1, "unpacked 1", id="sixteen unpacked samples"),
        pytest.param(2, "packed 1", id="two processes of four rows"),
        pytest.param(2, "packed 2", id="two replicas of four rows"),
        pytest.param(2, "unpacked 1", id="two processes of eight unpacked samples"),
        pytest.param(2, "shared rows", id="two processes that both compute all eight rows"),
        pytest.param(2, "divided rows", id="two processes that divide the tokens of each row"),
        pytest.param(2, "divided rows recomputed", id="two processes that divide tokens and compute them again"),
        pytest.param(2, "divided layers", id="two processes that divide the layers"),
        pytest.param(2, "divided layers recomputed", id="two processes that divide layers and compute them again"),
    ],
)
def test_loss_and_gradient_are_those_of_one_process_with_eight_rows(
    results: dict[int, dict[str, Any]], trainer: str, processes: int, division: str
) -> None:
    expected_loss, expected = results[1][f"{trainer} packed 1"]
    loss, gradient = results[processes][f"{trainer} {division}"]
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert expected.norm() > 0.1
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6 * float(expected.norm()))


@pytest.mark.parametrize(
    ("setting", "plain", "tolerance"),
    [
        ("adamw", "adamw", 1e-4),
        # The length of an update depends on the norm that gradients are clipped to, over all shards.
        ("sgd", "sgd", 1e-6),
        ("sgd of replicas", "sgd", 1e-6),
        # Gradients are rounded to bfloat16 before the reduction.
        ("muon", "muon", 1e-3),
        ("muon of replicas", "muon", 1e-3),
        ("fsdp_cpu_offload", "adamw", 1e-4),
        ("adamw of divided layers", "adamw", 1e-4),
        ("sgd of divided layers", "sgd", 1e-6),
        # Products of parts add up in another order, so that more elements round to a neighbor.
        ("muon of divided layers", "muon", 4e-3),
        # Blocks lie within rows, so shards have the same ones.
        ("adamw8bit", "adamw8bit", 0),
        ("adamw4bit", "adamw4bit", 0),
    ],
)
def test_two_processes_end_with_the_weights_of_one(
    results: dict[int, dict[str, Any]], setting: str, plain: str, tolerance: float
) -> None:
    if setting == "adamw8bit":
        pytest.importorskip("bitsandbytes", reason="needs the extra quantization")
    weights, expected = results[2][setting], results[1][plain]
    assert weights.keys() == expected.keys()
    for name in weights:
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=tolerance)


def test_a_checkpoint_moves_between_divided_and_whole_layers(results: dict[int, dict[str, Any]]) -> None:
    for saved, loaded in results[2]["moved"]:
        assert saved.norm() > 0.1
        assert torch.equal(saved, loaded)


@pytest.mark.slow
def test_eight_processes_train_as_one(tmp_path: Path) -> None:
    """Copies, rows and layers divided in two each: SFT, DPO and RL, exports, and checkpoints of one and of eight."""
    table = Path(__file__).with_name("all_meshes.py")
    cell = ["--models", "dense", "--settings", "all weights", "--meshes", "dp_replicate2-cp2-tp2"]
    command = [sys.executable, table, tmp_path, "--processes", "8", *cell]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("other bits: none") == 2


def test_offloaded_parameters_give_bit_identical_results(results: dict[int, dict[str, Any]]) -> None:
    for found in results.values():
        assert all(torch.equal(tensor, found["adamw"][name]) for name, tensor in found["fsdp_cpu_offload"].items())
