"""Started by `test_division_of_work.py`, alone and under torchrun with two processes.

Arguments: a model's directory, and a file for the results: losses and gradients of the same sixteen samples, divided
in several ways, and the weights after three updates with several settings.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from prime_rl.configs.trainer import AdamWConfig, DefaultLossConfig, ModelConfig, MuonConfig, OptimizerConfig, SGDConfig
from prime_rl.trainer.checkpoints.weights import gather_weights
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.optim.optimizer import clip_gradients, setup_optimizer
from prime_rl.trainer.process.errors import leaving_at_once
from prime_rl.trainer.process.world import World, destroy_world, setup_world, sum_over_processes
from prime_rl.trainer.rl.loss import setup_loss
from prime_rl.trainer.rl.packing import deal, pack_batch, to_row
from prime_rl.trainer.rl.rows import Row
from prime_rl.trainer.rl.step import ForwardBackward, StepSize
from prime_rl.trainer.sft.data.conversation import TokenizedSample
from prime_rl.trainer.sft.data.packer import PackedRow, lay_out
from prime_rl.trainer.sft.step import forward_backward
from prime_rl.transport.messages import TrainingBatch, TrainingSample

ROW_TOKENS = 60
# Two by two they fill eight rows.
LENGTHS = [length for short in range(6, 30, 3) for length in (short, ROW_TOKENS - short)]


def main(model_dir: str, results: Path) -> None:
    world = setup_world("cpu", timeout_s=120)
    found = {}
    for replicas in range(1, world.world_size + 1):
        model = setup_model(ModelConfig(name=model_dir, attn="sdpa", dp_replicate=replicas), world)
        for packing in ("packed", "unpacked"):
            found[f"sft {packing} {replicas}"] = sft_gradient(model, sft_rows(packing, world), world)
            found[f"rl {packing} {replicas}"] = rl_gradient(model, rl_rows(packing, world), world)
    for name, optim, settings in (
        ("adamw", AdamWConfig(lr=1e-2), {}),
        ("sgd", SGDConfig(lr=1e-2), {}),
        ("muon", MuonConfig(lr=1e-2), {}),
        ("muon of replicas", MuonConfig(lr=1e-2), {"dp_replicate": world.world_size}),
        ("fsdp_cpu_offload", AdamWConfig(lr=1e-2), {"fsdp_cpu_offload": True}),
    ):
        found[name] = trained_weights(ModelConfig(name=model_dir, attn="sdpa", **settings), optim, world)
    if world.is_main:
        torch.save(found, results)
    destroy_world()


def sft_rows(packing: str, world: World) -> list[PackedRow]:
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
    return rows[world.rank :: world.world_size]


def rl_rows(packing: str, world: World) -> list[Row]:
    """This process's rows."""
    random = np.random.default_rng(0)
    samples = [
        TrainingSample(
            prompt_ids=random.integers(4, 100, 3).tolist(),
            prompt_mask=[False] * 3,
            completion_ids=random.integers(4, 100, length - 3).tolist(),
            completion_mask=(random.random(length - 3) < 0.7).tolist(),
            completion_logprobs=random.uniform(-5.5, -4, length - 3).tolist(),
            completion_temperatures=[0.8] * (length - 3),
            advantage=float(random.normal()),
        )
        for length in LENGTHS
    ]
    if packing == "packed":
        dealt = pack_batch(TrainingBatch(samples, step=0), ROW_TOKENS, ROW_TOKENS, world.world_size)
        assert sum(map(len, dealt)) == len(LENGTHS) // 2
    else:
        dealt = deal([to_row(sample, ROW_TOKENS) for sample in samples], world.world_size)
    return [Row.of(row, world.device) for row in dealt[world.rank]]


def sft_gradient(model: nn.Module, rows: Sequence[PackedRow], world: World) -> tuple[float, Tensor]:
    trained_tokens = int(sum_over_processes([sum(int(row.is_trained.sum()) for row in rows)], world)[0])
    loss = sum_over_processes([forward_backward(model, rows, trained_tokens, world)], world)[0]
    return loss, taken_gradient(model)


def rl_gradient(model: nn.Module, rows: Sequence[Row], world: World) -> tuple[float, Tensor]:
    step = ForwardBackward(model, setup_loss(DefaultLossConfig()), 512, world)
    reported = step.run(rows, StepSize.of_all_ranks(rows)).gather()
    return float(reported["loss"].mean()) if world.is_main else 0.0, taken_gradient(model)


def taken_gradient(model: nn.Module) -> Tensor:
    gradient = torch.cat([parameter.grad.full_tensor().flatten() for parameter in model.parameters()])
    model.zero_grad()
    return gradient


def trained_weights(config: ModelConfig, optim: OptimizerConfig, world: World) -> dict[str, Tensor]:
    model = setup_model(config, world)
    optimizer = setup_optimizer(optim, model)
    rows = sft_rows("packed", world)
    for _ in range(3):
        forward_backward(model, rows, 300, world)
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return gather_weights(model, torch.float32)


with leaving_at_once():
    main(sys.argv[1], Path(sys.argv[2]))
