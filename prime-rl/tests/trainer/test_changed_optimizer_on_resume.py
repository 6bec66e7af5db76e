"""A resumed run uses the optimizer and the schedule of its own config, compared with plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from transformers import AutoModelForCausalLM, PreTrainedModel

from prime_rl.configs.trainer import (
    AdamWConfig,
    CheckpointConfig,
    ConstantSchedulerConfig,
    CosineSchedulerConfig,
    LinearSchedulerConfig,
    MuonConfig,
    OptimizerConfig,
    SchedulerConfig,
    SGDConfig,
)
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.checkpoints.manager import CheckpointManager
from prime_rl.trainer.checkpoints.state import TrainedModel, TrainState
from prime_rl.trainer.optim.optimizer import setup_optimizer
from prime_rl.trainer.optim.scheduler import setup_scheduler
from prime_rl.trainer.process.mesh import Mesh

BEFORE, AFTER = 4, 8
"""Updates before the checkpoint, and after it."""
STEPS = BEFORE + AFTER

OPTIMIZERS = [
    pytest.param(
        AdamWConfig(lr=2e-3),
        AdamWConfig(lr=1e-3, betas1=0.8, betas2=0.9, weight_decay=0.3),
        [{"betas": (0.8, 0.9), "weight_decay": 0.3, "lr": 1e-3}],
        id="adamw",
    ),
    pytest.param(
        SGDConfig(lr=2e-3),
        SGDConfig(lr=1e-3, momentum=0.5, nesterov=False, weight_decay=0.3),
        [{"momentum": 0.5, "nesterov": False, "weight_decay": 0.3, "lr": 1e-3}],
        id="sgd",
    ),
    pytest.param(
        MuonConfig(lr=2e-3),
        MuonConfig(lr=1e-3, mu=0.5, betas1=0.8, betas2=0.9, weight_decay=0.3),
        [
            {"momentum": 0.5, "weight_decay": 0.3, "lr": 1e-3},
            {"betas": (0.8, 0.9), "weight_decay": 0.3, "lr": 1e-3},
        ],
        id="muon",
    ),
]


def constant(optimizer: Optimizer) -> LRScheduler:
    return ConstantLR(optimizer, factor=1.0)


def linear(optimizer: Optimizer) -> LRScheduler:
    """Three updates of warm-up from 1e-4, and five of decay to 1e-4; the rate is 1e-3."""
    parts = [
        LinearLR(optimizer, start_factor=0.1, total_iters=3),
        ConstantLR(optimizer, factor=1.0),
        LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=4),
    ]
    return SequentialLR(optimizer, parts, milestones=[3, STEPS - 5])


def cosine(optimizer: Optimizer) -> LRScheduler:
    """Three updates of warm-up from 1e-4, then a cosine to 1e-4; the rate is 1e-3."""
    parts = [
        LinearLR(optimizer, start_factor=0.1, total_iters=3),
        CosineAnnealingLR(optimizer, T_max=STEPS - 3, eta_min=1e-4),
    ]
    return SequentialLR(optimizer, parts, milestones=[3])


SCHEDULES = [
    pytest.param(ConstantSchedulerConfig(), constant, id="constant"),
    pytest.param(LinearSchedulerConfig(warmup_steps=3, decay_steps=5, min_lr=1e-4), linear, id="linear"),
    pytest.param(CosineSchedulerConfig(warmup_steps=3, min_lr=1e-4), cosine, id="cosine"),
]


def new_state(model_dir: Path, optim: OptimizerConfig, schedule: SchedulerConfig, max_steps: int) -> TrainState:
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    optimizer = setup_optimizer(optim, model)
    return TrainState({"policy": TrainedModel(model, optimizer, setup_scheduler(schedule, optimizer, max_steps))})


def give_gradients(model: PreTrainedModel, update: int) -> None:
    generator = torch.Generator().manual_seed(update)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(state: TrainState, updates: range) -> list[float]:
    """Returns the rate of each update."""
    rates = []
    for update in updates:
        give_gradients(state.policy.model, update)
        rates += {group["lr"] for group in state.policy.optimizer.param_groups}
        assert state.policy.scheduler.get_last_lr()[0] == rates[-1]
        state.policy.optimizer.step()
        state.policy.scheduler.step()
        state.progress.advance(tokens=1, samples=1)
    return rates


def manager(root: Path, mesh: Mesh, **fields: Any) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(**fields), RunPaths(root), mesh.process, mesh.data_axis)


@pytest.mark.parametrize(("schedule", "reference"), SCHEDULES)
@pytest.mark.parametrize("earlier", [each.values[0] for each in SCHEDULES], ids=lambda config: f"from_{config.type}")
def test_rates_after_a_resume_are_those_of_a_run_with_the_new_config_from_its_start(
    tiny_model_dir: Path,
    tmp_path: Path,
    mesh: Mesh,
    earlier: SchedulerConfig,
    schedule: SchedulerConfig,
    reference: Callable[[Optimizer], LRScheduler],
) -> None:
    first = new_state(tiny_model_dir, AdamWConfig(lr=2e-3), earlier, max_steps=30)
    train(first, range(BEFORE))
    manager(tmp_path, mesh).save(first, {})

    resumed = new_state(tiny_model_dir, AdamWConfig(lr=1e-3), schedule, max_steps=STEPS)
    manager(tmp_path, mesh).load(resumed, BEFORE)

    plain = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler, expected = reference(plain), []
    for _ in range(STEPS):
        expected.append(plain.param_groups[0]["lr"])
        plain.step()
        scheduler.step()
    assert train(resumed, range(BEFORE, STEPS)) == pytest.approx(expected[BEFORE:], rel=1e-9)


@pytest.mark.parametrize(("earlier", "config", "settings"), OPTIMIZERS)
def test_updates_after_a_resume_use_the_new_settings_and_the_saved_state(
    tiny_model_dir: Path,
    tmp_path: Path,
    mesh: Mesh,
    earlier: OptimizerConfig,
    config: OptimizerConfig,
    settings: list[Mapping[str, Any]],
) -> None:
    reference = new_state(tiny_model_dir, earlier, ConstantSchedulerConfig(), STEPS)
    train(reference, range(BEFORE))
    manager(tmp_path, mesh).save(reference, {})

    resumed = new_state(tiny_model_dir, config, ConstantSchedulerConfig(), STEPS)
    manager(tmp_path, mesh).load(resumed, BEFORE)
    train(resumed, range(BEFORE, STEPS))

    for group, values in zip(reference.policy.optimizer.param_groups, settings, strict=True):
        group.update(values)
    for update in range(BEFORE, STEPS):
        give_gradients(reference.policy.model, update)
        reference.policy.optimizer.step()
    expected = reference.policy.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.policy.model.state_dict().items())


def test_without_the_saved_schedule_the_new_one_starts_at_its_beginning(
    tiny_model_dir: Path, tmp_path: Path, mesh: Mesh
) -> None:
    first = new_state(tiny_model_dir, AdamWConfig(lr=2e-3), ConstantSchedulerConfig(), STEPS)
    train(first, range(BEFORE))
    manager(tmp_path, mesh).save(first, {})
    schedule = LinearSchedulerConfig(warmup_steps=2, decay_steps=0, min_lr=1e-4)
    resumed = new_state(tiny_model_dir, AdamWConfig(lr=1e-3), schedule, AFTER)
    manager(tmp_path, mesh, skip_scheduler=True).load(resumed, BEFORE)
    assert train(resumed, range(4)) == pytest.approx([1e-4, 5.5e-4, 1e-3, 1e-3])
