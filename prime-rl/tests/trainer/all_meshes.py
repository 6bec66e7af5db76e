"""Trains tiny models on every mesh of a number of processes, and compares each with one process.

    python prime-rl/tests/trainer/all_meshes.py DIRECTORY [--processes 8] [--models dense ...] [--meshes cp2-tp2 ...]

For each model and setting: losses, gradients and gradient norms of SFT, DPO and RL, and the exported weights after two
steps. Then each mesh loads the checkpoints of all others, and must hold the same bits. One line for each; exits with 1
if one differs. All meshes of eight processes take longer than a CI run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from gradients_of_a_batch import LENGTHS, rl_gradient, rl_rows, sft_gradient, sft_rows
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from prime_rl.configs.dpo import PreferenceLossConfig
from prime_rl.configs.trainer import (
    AdamW4bitConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    SGDConfig,
)
from prime_rl.trainer.checkpoints.sharded import read_sharded, save_sharded
from prime_rl.trainer.checkpoints.state import TrainedModel
from prime_rl.trainer.checkpoints.weights import gather_weights
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.optim.optimizer import clip_gradients, setup_optimizer
from prime_rl.trainer.preferences.objective import Preferences
from prime_rl.trainer.process.errors import leaving_at_once
from prime_rl.trainer.process.mesh import Mesh, setup_mesh
from prime_rl.trainer.process.world import Process, destroy_world, setup_world
from prime_rl.trainer.sft.data.pairs import Pair
from prime_rl.trainer.sft.step import CrossEntropy, forward_backward
from prime_rl.transport.loading import full_tensor, put_own

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 128}
LINEAR = {"linear_num_key_heads": 8, "linear_num_value_heads": 8}
MODELS = {
    "dense": ("qwen3", HEADS),
    "experts": ("qwen3_moe", HEADS | {"num_local_experts": 8}),
    # Rows of 256 values, whose moments have 8 or 4 bits.
    "experts in 8 bits": ("qwen3_moe", HEADS | {"num_local_experts": 8, "hidden_size": 256}),
    "dense in 4 bits": ("qwen3", HEADS | {"hidden_size": 256}),
    "hybrid": ("qwen3_5_text", HEADS | LINEAR | {"layer_types": ["linear_attention", "full_attention"]}),
}
ADAPTER = LoRAConfig(rank=4, alpha=8, target_modules=["all-linear", "experts"])
SETTINGS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "adapter, recomputed": {"lora": ADAPTER, "ac": {"freq": 1}},
    "in chunks": {"mlp_chunk_tokens": 16, "ac": {"freq": 1}},
    "offloaded": {"fsdp_cpu_offload": True},
}
Found = dict[str, Tensor]


def meshes(processes: int, model: str) -> Iterator[str]:
    """All that differ. An axis that is not named has one process, and `dp_shard` the rest."""
    sizes = [2**power for power in range(processes.bit_length())]
    is_mixture, is_small = model.startswith("experts"), model.endswith("bits")
    for copies, cp, tp in itertools.product(sizes, repeat=3):
        if processes % (copies * cp * tp) or (is_small and tp > 1):  # refused: `optim_faults`
            continue
        # With ep = 1, experts are divided by tp.
        experts = [ep for ep in sizes if ep > tp and processes % (copies * ep) == 0] if is_mixture else []
        for ep in (1, *experts):
            axes = {"dp_replicate": copies, "cp": cp, "tp": tp, "ep": ep}
            yield "-".join(f"{axis}{size}" for axis, size in axes.items() if size > 1) or "dp_shard"


def config_of(directory: Path, model: str, settings: str, mesh: str) -> ModelConfig:
    axes = {axis: int(size) for axis, size in re.findall(r"([a-z_]+)(\d+)", mesh)}
    return ModelConfig(name=str(directory / model), attn="sdpa", **SETTINGS[settings], **axes)


def optimizer_of(config: ModelConfig) -> OptimizerConfig:
    if config.name.endswith("4 bits"):
        return AdamW4bitConfig(lr=1e-3)
    return AdamW8bitConfig(lr=1e-3) if config.name.endswith("8 bits") else AdamWConfig(lr=1e-3)


def built(config: ModelConfig, process: Process) -> tuple[PreTrainedModel, Mesh]:
    mesh, drawn = setup_mesh(config, process), torch.Generator().manual_seed(1)
    model = setup_model(config, mesh)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora.B"):
                put_own(parameter, torch.empty(parameter.shape).normal_(0, 0.05, generator=drawn))
    return model, mesh


def trained_on(config: ModelConfig, process: Process, checkpoint: Path) -> Found:
    """What the mesh of `config` computes. Saves a checkpoint, and beside it the whole tensors that it holds."""
    model, mesh = built(config, process)
    rows = sft_rows("packed", mesh)
    keys = range(mesh.data_axis.data_rank, len(LENGTHS) // 2, mesh.data_axis.data_size)
    of_pairs = [replace(row, members=(Pair(*row.sequences, key=key),)) for row, key in zip(rows, keys, strict=True)]
    pairs = Preferences(PreferenceLossConfig(), torch.linspace(-90, -60, len(LENGTHS)).view(-1, 2))
    found: Found = {}
    losses = {
        "sft": lambda: sft_gradient(model, rows, mesh),
        "dpo": lambda: sft_gradient(model, of_pairs, mesh, pairs),
        "rl": lambda: rl_gradient(model, rl_rows("packed", mesh), mesh),
    }
    for name, compute in losses.items():
        loss, found[f"{name} gradient"] = compute()
        found[f"{name} loss"] = torch.tensor(loss)
    for optim in (SGDConfig(lr=1e-2), optimizer_of(config)):
        optimizer = setup_optimizer(optim, model)
        for step in range(2):
            forward_backward(model, rows, CrossEntropy(), [300], mesh)
            found[f"norm of step {step}"] = torch.tensor(clip_gradients(model, 1.0))
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(optim, SGDConfig):
            found |= gather_weights(model, torch.float32)
    trained = TrainedModel(model, optimizer, LambdaLR(optimizer, lambda step: 1.0))
    save_sharded(trained.tensors(), checkpoint, None)
    whole = whole_tensors(trained.tensors())
    if process.is_main:
        torch.save(whole, checkpoint.with_suffix(".pt"))
    return found


def whole_tensors(tree: Mapping[str, Any], path: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for key, value in tree.items():
        name = f"{path}.{key}"
        if isinstance(value, Mapping):
            found |= whole_tensors(value, name)
        elif isinstance(value, Tensor):
            found[name] = full_tensor(value) if isinstance(value, DTensor) else value.clone()
    return found


def differences(found: Found, expected: Found) -> dict[str, float]:
    """Norm of each difference, relative to what is expected. RL's loss is a sum that nearly cancels out."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return {
        name: float((found[name].double() - each.double()).norm() / each.double().norm().clamp_min(0.1))
        for name, each in expected.items()
    }


def different_checkpoints(config: ModelConfig, process: Process, saved_in: Sequence[Path]) -> list[str]:
    """Names of the checkpoints that the mesh of `config` loads with other bits than were saved."""
    model, _ = built(config, process)
    optimizer = setup_optimizer(optimizer_of(config), model)
    trained, different = TrainedModel(model, optimizer, LambdaLR(optimizer, lambda step: 1.0)), []
    for saved in saved_in:
        tensors = trained.tensors()
        read_sharded(tensors, saved.with_suffix(""))
        trained.restore(tensors, None)
        loaded, expected = whole_tensors(trained.tensors()), torch.load(saved)
        is_same = loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in loaded)
        different += [] if is_same else [saved.stem]
    return different


def say(*columns: str) -> None:
    sys.stdout.write(" | ".join(columns) + "\n")
    sys.stdout.flush()


def train(arguments: argparse.Namespace, row: Sequence[str], process: Process) -> bool:
    """Whether the mesh of a row computes what one process does, which is the first to run."""
    model, settings, mesh = row
    config = config_of(arguments.directory, *row)
    kept = arguments.directory / f"{model}, {settings}"
    kept.mkdir(exist_ok=True)
    found = trained_on(config, process, kept / f"{process.world_size} {mesh}")
    if process.world_size == 1:
        torch.save(found, kept / "reference")
    if not process.is_main:
        return True
    name, largest = max(differences(found, torch.load(kept / "reference")).items(), key=lambda item: item[1])
    say(*row, f"{largest:.1e} {name}")
    return largest <= 1e-5


def load(arguments: argparse.Namespace, row: Sequence[str], process: Process) -> bool:
    """Whether the mesh of a row loads the checkpoints of all others bit by bit."""
    model, settings, _ = row
    saved = sorted((arguments.directory / f"{model}, {settings}").glob("*.pt"))[:: arguments.every]
    different = different_checkpoints(config_of(arguments.directory, *row), process, saved)
    if process.is_main:
        say(*row, f"other bits: {', '.join(different) or 'none'}")
    return not different


def launch(arguments: argparse.Namespace) -> int:
    """Each row in processes of its own, or the groups of all meshes would stay open and slow the later ones.

    They are forks of this one: loading PyTorch takes most of a small table's time.
    """
    sys.path.append(str(Path(__file__).parents[1] / "models"))
    from model_cases import Case, save_tiny_model

    for model in arguments.models:
        save_tiny_model(Case(*MODELS[model]), arguments.directory / model)
    rows = [
        (count, (model, settings, mesh))
        for count in (1, arguments.processes)
        for model in arguments.models
        for settings in arguments.settings
        if not (model.startswith("experts") and "mlp_chunk_tokens" in SETTINGS[settings])  # refused
        for mesh in meshes(count, model)
        if count == 1 or not arguments.meshes or mesh in arguments.meshes
    ]
    codes = [forked(partial(work, arguments, row), count) for work in (train, load) for count, row in rows]
    return next(filter(None, codes), 0)


def forked(work: Callable[[Process], bool], processes: int) -> int:
    """The exit code of `work` in some processes: the first that is not 0."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    children = set()
    for rank in range(processes):
        if (child := os.fork()) == 0:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            os.environ |= {key: str(value) for key, value in place.items()}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            with leaving_at_once():
                is_right = work(setup_world("cpu", timeout_s=3600))
                destroy_world()
                sys.exit(not is_right)
        children.add(child)
    code = 0
    while children:
        child, status = os.wait()
        children.discard(child)
        if status != 0 and code == 0:
            code = os.waitstatus_to_exitcode(status)
            say(f"a process of {processes} ended with {code}")
            for other in children:  # else they would wait for it
                os.kill(other, signal.SIGKILL)
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=cast("str", __doc__))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--meshes", nargs="*", default=[])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--every", type=int, default=1, help="load every n-th checkpoint (default: all)")
    torch.set_num_threads(1)
    sys.exit(launch(parser.parse_args()))
