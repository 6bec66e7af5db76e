"""Started by `test_division_of_work.py` as a single process, and with two processes under torchrun.

Arguments: a model's directory, and a file for the results: losses and gradients of the same sixteen samples, divided
in several ways, and the weights after three updates with several settings.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from prime_rl.configs.distillation import SFTDistillationConfig
from prime_rl.configs.model import DebugModelConfig
from prime_rl.configs.trainer import (
    AdamW4bitConfig,
    AdamW8bitConfig,
    AdamWConfig,
    DefaultLossConfig,
    ModelConfig,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
)
from prime_rl.trainer.checkpoints.sharded import read_sharded, save_sharded
from prime_rl.trainer.checkpoints.state import TrainedModel
from prime_rl.trainer.checkpoints.weights import gather_weights
from prime_rl.trainer.model.build import setup_frozen, setup_model
from prime_rl.trainer.optim.optimizer import clip_gradients, setup_optimizer
from prime_rl.trainer.process.errors import leaving_at_once
from prime_rl.trainer.process.mesh import DataAxis, Mesh, setup_mesh
from prime_rl.trainer.process.world import Process, destroy_world, setup_world
from prime_rl.trainer.rl.batches import distribute, pack_batch, row_from_sample
from prime_rl.trainer.rl.loss import setup_loss
from prime_rl.trainer.rl.rows import Row
from prime_rl.trainer.rl.step import ForwardBackward, StepSize
from prime_rl.trainer.sft.data.conversation import TokenizedSample
from prime_rl.trainer.sft.data.packer import PackedRow, lay_out
from prime_rl.trainer.sft.step import CrossEntropy, Distilled, Objective, forward_backward, sizes_of
from prime_rl.transport.loading import full_tensor, put_own
from prime_rl.transport.messages import TrainingBatch, TrainingSample

ROW_TOKENS = 60
# Every two samples fill a row: eight rows.
DIVISIONS = {
    "divided rows": {"cp": 2},
    "divided rows recomputed": {"cp": 2, "ac": {"freq": 1}},
    "divided layers": {"tp": 2},
    "divided layers recomputed": {"tp": 2, "ac": {"freq": 1}},
}
LENGTHS = [length for short in range(6, 30, 3) for length in (short, ROW_TOKENS - short)]


def main(model_dir: str, results: Path) -> None:
    process = setup_world("cpu", timeout_s=3600)
    found = {}
    for replicas in range(1, process.world_size + 1):
        config = ModelConfig(name=model_dir, attn="sdpa", dp_replicate=replicas)
        mesh = setup_mesh(config, process)
        model = setup_model(config, mesh)
        for packing in ("packed", "unpacked"):
            found[f"sft {packing} {replicas}"] = sft_gradient(model, sft_rows(packing, mesh), mesh)
            found[f"distilled {packing} {replicas}"] = distilled_gradient(model, sft_rows(packing, mesh), mesh, config)
            found[f"rl {packing} {replicas}"] = rl_gradient(model, rl_rows(packing, mesh), mesh)
    if process.world_size == 2:
        config = ModelConfig(name=model_dir, attn="sdpa")
        mesh = sharing_mesh(process)
        model = setup_model(config, mesh)
        found["sft shared rows"] = sft_gradient(model, sft_rows("packed", mesh), mesh)
        found["distilled shared rows"] = distilled_gradient(model, sft_rows("packed", mesh), mesh, config)
        found["rl shared rows"] = rl_gradient(model, rl_rows("packed", mesh), mesh)
        for name, settings in DIVISIONS.items():
            config = ModelConfig(name=model_dir, attn="sdpa", **settings)
            mesh = setup_mesh(config, process)
            model = setup_model(config, mesh)
            found[f"sft {name}"] = sft_gradient(model, sft_rows("packed", mesh), mesh)
            found[f"distilled {name}"] = distilled_gradient(model, sft_rows("packed", mesh), mesh, config)
            found[f"rl {name}"] = rl_gradient(model, rl_rows("packed", mesh), mesh)
        found["moved"] = [
            moved_checkpoint(results.parent / "to_layers", [{}, {"tp": 2}], model_dir, process),
            moved_checkpoint(results.parent / "from_layers", [{"tp": 2}, {}], model_dir, process),
        ]
    for name, optim, settings in (
        ("adamw", AdamWConfig(lr=1e-2), {}),
        ("sgd", SGDConfig(lr=1e-2), {}),
        ("sgd of replicas", SGDConfig(lr=1e-2), {"dp_replicate": process.world_size}),
        ("muon", MuonConfig(lr=1e-2), {}),
        ("muon of replicas", MuonConfig(lr=1e-2), {"dp_replicate": process.world_size}),
        ("fsdp_cpu_offload", AdamWConfig(lr=1e-2), {"fsdp_cpu_offload": True}),
        ("adamw of divided layers", AdamWConfig(lr=1e-2), {"tp": process.world_size}),
        ("sgd of divided layers", SGDConfig(lr=1e-2), {"tp": process.world_size}),
        ("muon of divided layers", MuonConfig(lr=1e-2), {"tp": process.world_size}),
    ):
        found[name] = trained_weights(ModelConfig(name=model_dir, attn="sdpa", **settings), optim, process)
    found["adamw4bit"] = updated_matrix(AdamW4bitConfig(lr=1e-2), process)
    if find_spec("bitsandbytes") is not None:
        found["adamw8bit"] = updated_matrix(AdamW8bitConfig(lr=1e-2), process)
    if process.is_main:
        torch.save(found, results)
    destroy_world()


def sharing_mesh(process: Process) -> Mesh:
    """Two processes shard the weights, and share rows as tensor parallel ones do, without dividing layers."""
    fsdp = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    return Mesh(process, fsdp, DataAxis.from_ranks(torch.arange(2)[None], ("dp_shard", "tp"), process.rank))


def sft_rows(packing: str, mesh: Mesh) -> list[PackedRow]:
    """This process's rows."""
    random = np.random.default_rng(0)
    samples = [
        TokenizedSample(random.integers(4, 100, length + 1, dtype=np.int32), random.random(length + 1) < 0.7)
        for length in LENGTHS
    ]
    if packing == "packed":
        rows = [lay_out(pair, ROW_TOKENS, ROW_TOKENS) for pair in zip(samples[::2], samples[1::2], strict=True)]
    else:
        rows = [lay_out([sample], sample.inputs, ROW_TOKENS) for sample in samples]
    return rows[mesh.data_axis.data_rank :: mesh.data_axis.data_size]


def rl_rows(packing: str, mesh: Mesh) -> list[Row]:
    """This process's rows."""
    random = np.random.default_rng(0)
    samples = [
        TrainingSample(
            prompt_ids=random.integers(4, 100, 3).tolist(),
            prompt_mask=[False] * 3,
            completion_ids=random.integers(4, 100, length - 3).tolist(),
            completion_mask=(random.random(length - 3) < 0.7).tolist(),
            inference_logprobs=random.uniform(-5.5, -4, length - 3).tolist(),
            completion_temperatures=[0.8] * (length - 3),
            advantage=float(random.normal()),
        )
        for length in LENGTHS
    ]
    if packing == "packed":
        distributed = pack_batch(TrainingBatch(samples, step=0), ROW_TOKENS, ROW_TOKENS, mesh.data_axis.data_size)
        assert sum(map(len, distributed)) == len(LENGTHS) // 2
    else:
        distributed = distribute([row_from_sample(sample, ROW_TOKENS) for sample in samples], mesh.data_axis.data_size)
    return [Row.from_message(row, mesh.process.device) for row in distributed[mesh.data_axis.data_rank]]


def sft_gradient(
    model: PreTrainedModel, rows: Sequence[PackedRow], mesh: Mesh, objective: Objective | None = None
) -> tuple[float, Tensor]:
    axis, device, objective = mesh.data_axis, mesh.process.device, objective or CrossEntropy()
    sizes = [int(size) for size in axis.sum(sizes_of(rows, objective), device)]
    objective.prepare(model, rows, mesh)
    loss = axis.sum([forward_backward(model, rows, objective, sizes, mesh)["loss"]], device)[0]
    return loss, taken_gradient(model)


def distilled_gradient(
    model: PreTrainedModel, rows: Sequence[PackedRow], mesh: Mesh, config: ModelConfig
) -> tuple[float, Tensor]:
    """With a teacher that has other weights."""
    objective = Distilled(SFTDistillationConfig(teacher="random", top_k=8, sft_coef=0.5))
    objective.teacher = setup_frozen(config.model_copy(update={"debug": DebugModelConfig(random_init=True)}), mesh)
    return sft_gradient(model, rows, mesh, objective)


def rl_gradient(model: nn.Module, rows: Sequence[Row], mesh: Mesh) -> tuple[float, Tensor]:
    step = ForwardBackward(model, setup_loss(DefaultLossConfig()), 512, mesh)
    reported = step.run(rows, StepSize.from_rows(rows, mesh.data_axis)).gather(mesh.data_axis)
    return float(reported["loss"].mean()) if mesh.process.is_main else 0.0, taken_gradient(model)


def taken_gradient(model: nn.Module) -> Tensor:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    gradient = torch.cat([full_tensor(each).flatten() for each in gradients])
    model.zero_grad()
    return gradient


def trained_weights(config: ModelConfig, optim: OptimizerConfig, process: Process) -> dict[str, Tensor]:
    mesh = setup_mesh(config, process)
    model = setup_model(config, mesh)
    train(model, setup_optimizer(optim, model), mesh)
    return gather_weights(model, torch.float32)


def updated_matrix(optim: OptimizerConfig, process: Process) -> dict[str, Tensor]:
    """A matrix whose rows are whole blocks, after three updates by the same gradients for any number of processes."""
    torch.manual_seed(0)
    layer = nn.Linear(512, 31, bias=False)  # of two processes, one has a row more
    if process.world_size > 1:
        fully_shard(layer, mesh=init_device_mesh("cpu", (process.world_size,)))
    optimizer = setup_optimizer(optim, layer)
    for _ in range(3):
        layer.weight.grad = torch.empty_like(layer.weight)
        put_own(layer.weight.grad, torch.randn(layer.weight.shape))
        optimizer.step()
    return {"weight": full_tensor(layer.weight.detach())}


def train(model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> None:
    rows = sft_rows("packed", mesh)
    for _ in range(3):
        forward_backward(model, rows, CrossEntropy(), [300], mesh)
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def moved_checkpoint(
    directory: Path, divisions: Sequence[dict[str, Any]], model_dir: str, process: Process
) -> list[Tensor]:
    """Weights and moments before a save with the first of two divisions, and after loading with the second."""
    held = []
    for index, settings in enumerate(divisions):
        config = ModelConfig(name=model_dir, attn="sdpa", **settings)
        mesh = setup_mesh(config, process)
        model = setup_model(config, mesh)
        optimizer = setup_optimizer(AdamWConfig(lr=1e-2), model)
        trained = TrainedModel(model, optimizer, LambdaLR(optimizer, lambda step: 1.0))
        if index == 0:
            train(model, optimizer, mesh)
            save_sharded(trained.tensors(), directory, None)
        else:
            tensors = trained.tensors()
            read_sharded(tensors, directory)
            trained.restore(tensors, None)
        states = [
            [parameter, *(optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq"))]
            for parameter in model.parameters()
        ]
        held.append(torch.cat([full_tensor(each.detach()).flatten() for state in states for each in state]))
    return held


if __name__ == "__main__":
    with leaving_at_once():
        main(sys.argv[1], Path(sys.argv[2]))
