"""Started as several processes under torchrun, on a CPU by `test_divided_rows.py` and on GPUs by `benchmarks/gpu`.

Arguments: the device, a directory with models, and JSON of the sizes of meshes by model and by the mesh's name. Saves
`found.pt` there: each model's SFT loss, gradient and fingerprint of frozen weights, on the same rows: where every
process computes all of them, and where meshes divide rows, tokens, layers and experts. A model whose name ends in
"adapter" gets a new adapter. One in "replayed" is routed to drawn experts. With "dropout", all processes draw the same
random numbers. "balanced" adds the load-balancing loss.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from model_cases import Case, save_tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from prime_rl.configs.trainer import LoRAConfig, ModelConfig
from prime_rl.trainer.checkpoints.state import identity_of_frozen
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.scoring import replaying
from prime_rl.trainer.optim.optimizer import global_norm
from prime_rl.trainer.process.errors import leaving_at_once
from prime_rl.trainer.process.mesh import DataAxis, Mesh, setup_mesh
from prime_rl.trainer.process.world import Process, destroy_world, setup_world
from prime_rl.trainer.sft.data.conversation import TokenizedSample
from prime_rl.trainer.sft.data.packer import PackedRow, lay_out
from prime_rl.trainer.sft.step import CrossEntropy, forward_backward
from prime_rl.transport.loading import full_tensor, put_own

ROW_TOKENS = 46
LENGTHS = ((7, 39), (46,), (5, 5, 13), (30, 2))
"""Samples of each row. The third row is short, and no row's length is a multiple of four."""
Device = Literal["cpu", "cuda"]
Found = dict[tuple[str, str], tuple[float, Tensor, int]]
"""Loss, gradient and fingerprint by model and mesh."""


def launched(
    directory: Path, models: Mapping[str, tuple[Case, str]], processes: int = 4, device: Device = "cpu"
) -> Found:
    """What this script finds of `models`, each with the names of meshes, in one launch."""
    sizes: dict[str, dict[str, dict[str, int]]] = {}
    for name, (case, meshes) in models.items():
        save_tiny_model(case, directory / name)
        axes = {mesh: re.findall(r"([a-z_]+)(\d)", mesh) for mesh in meshes.split()}
        sizes[name] = {mesh: {axis: int(size) for axis, size in found} for mesh, found in axes.items()}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launcher, __file__, device, directory, json.dumps(sizes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded: Found = torch.load(directory / "found.pt")
    return loaded


def rows_of(mesh: Mesh) -> list[PackedRow]:
    """This process's rows."""
    random = np.random.default_rng(0)
    rows = [
        lay_out(
            [
                TokenizedSample(random.integers(4, 64, length + 1, dtype=np.int32), random.random(length + 1) < 0.7)
                for length in lengths
            ],
            ROW_TOKENS,
            ROW_TOKENS,
        )
        for lengths in LENGTHS
    ]
    return rows[mesh.data_axis.data_rank :: mesh.data_axis.data_size]


def meshes(
    model: ModelConfig, divisions: dict[str, dict[str, int]], process: Process
) -> Iterator[tuple[str, ModelConfig, Mesh]]:
    whole = init_device_mesh(process.device.type, (process.world_size,), mesh_dim_names=("dp_shard",))
    shared = DataAxis.from_ranks(torch.arange(process.world_size)[None], ("dp_shard", "tp"), process.rank)
    yield "whole rows", model, Mesh(process, whole, shared)
    for name, sizes in divisions.items():
        config = model.model_copy(update=sizes)
        yield name, config, setup_mesh(config, process)


def gradient(config: ModelConfig, mesh: Mesh) -> tuple[float, Tensor, int]:
    model = setup_model(config, mesh, has_dropout="dropout" in config.name)
    rows, axis, device = rows_of(mesh), mesh.data_axis, mesh.process.device
    trained_tokens = int(axis.sum([sum(int(row.is_trained.sum()) for row in rows)], device)[0])
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora.B"):
                put_own(parameter, torch.empty(parameter.shape).normal_(0, 0.05, generator=drawn))
    losses = []
    if config.name.endswith("balanced"):
        # The load-balancing loss is a mean over rows.
        losses.append(forward_backward(model, rows, CrossEntropy(), [trained_tokens], mesh)["loss"])
    for row in rows if not losses else ():
        # Of its samples: processes that train on other rows draw for them what one process with all rows does.
        torch.manual_seed(len(row.input_ids))
        routes = drawn_routes(len(row.input_ids)).to(device) if config.name.endswith("replayed") else None
        with replaying(model, routes):
            losses.append(forward_backward(model, [row], CrossEntropy(), [trained_tokens], mesh)["loss"])
    if mesh.tensor_axis is not None and "dropout" in config.name:
        states = [torch.empty_like(torch.get_rng_state()) for _ in range(mesh.tensor_axis.sharing.size())]
        dist.all_gather(states, torch.get_rng_state(), group=mesh.tensor_axis.sharing.get_group())
        assert all(torch.equal(state, states[0]) for state in states), "the next masks would differ"
    loss = axis.sum([sum(losses)], device)[0]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    whole = torch.cat([full_tensor(each).flatten() for each in gradients])
    # In float32, the norm of all elements together is less exact.
    torch.testing.assert_close(global_norm(gradients), whole.double().norm().float())
    return loss, whole.cpu(), identity_of_frozen(model)["weights"]


def drawn_routes(length: int) -> Tensor:
    """Two of four experts for each token and layer."""
    random = np.random.default_rng(length)
    return torch.from_numpy(np.argsort(random.random((length, 2, 4)))[..., :2].astype(np.uint8))


def main(device: Device, directory: Path, divisions: dict[str, dict[str, dict[str, int]]]) -> None:
    process = setup_world(device, timeout_s=3600)
    torch.set_float32_matmul_precision("highest")  # on a GPU, a run multiplies in TF32
    found = {}
    for of_model, sizes in divisions.items():
        dropout = 0.25 if "dropout" in of_model else 0.0
        lora = LoRAConfig(rank=4, alpha=8, dropout=dropout, target_modules=["all-linear", "experts"])
        lora = lora if of_model.endswith("adapter") else None
        model = ModelConfig(name=str(directory / of_model), attn="sdpa", seq_len=ROW_TOKENS, lora=lora)
        if of_model.endswith("balanced"):
            model = model.model_copy(update={"router_aux_loss_coef": 0.5})
        for name, config, mesh in meshes(model, sizes, process):
            found[of_model, name] = gradient(config, mesh)
    if process.is_main:
        torch.save(found, directory / "found.pt")
    destroy_world()


if __name__ == "__main__":
    with leaving_at_once():
        main("cuda" if sys.argv[1] == "cuda" else "cpu", Path(sys.argv[2]), json.loads(sys.argv[3]))
