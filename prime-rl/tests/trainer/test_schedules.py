from __future__ import annotations

import pytest
import torch

from prime_rl.configs.trainer import (
    ConstantSchedulerConfig,
    CosineSchedulerConfig,
    LinearSchedulerConfig,
    SchedulerConfig,
)
from prime_rl.trainer.optim.scheduler import setup_scheduler
from prime_rl.trainer.process.errors import TrainerError


def rates(config: SchedulerConfig, max_steps: int | None, updates: int, lr: float = 1.0) -> list[float]:
    """The learning rates of the first updates."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = setup_scheduler(config, optimizer, max_steps)
    used = []
    for _ in range(updates):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used


def test_linear_warms_up_and_decays_to_the_floor() -> None:
    config = LinearSchedulerConfig(warmup_steps=3, decay_steps=4, min_lr=0.1)
    assert rates(config, 10, 10) == pytest.approx([0.1, 0.4, 0.7, 1, 1, 1, 1, 0.7, 0.4, 0.1])


def test_linear_can_decay_to_zero() -> None:
    config = LinearSchedulerConfig(warmup_steps=0, decay_steps=10, min_lr=0.1)
    assert rates(config, 10, 10) == pytest.approx([1 - 0.1 * update for update in range(10)])


def test_linear_with_one_decay_step_ends_at_the_floor() -> None:
    config = LinearSchedulerConfig(warmup_steps=0, decay_steps=1, min_lr=0.25)
    assert rates(config, 4, 5) == pytest.approx([1, 1, 1, 0.25, 0.25])


def test_linear_without_a_floor_starts_near_zero() -> None:
    config = LinearSchedulerConfig(warmup_steps=2, decay_steps=0)
    assert rates(config, None, 4, lr=2.0) == pytest.approx([2e-8, 1.0, 2.0, 2.0])


def test_cosine_has_the_recorded_values() -> None:
    config = CosineSchedulerConfig(warmup_steps=3, min_lr=0.1)
    expected = [0.1, 0.4, 0.7, 1, 0.955436, 0.830570, 0.650134, 0.449866, 0.269430, 0.144564]
    assert rates(config, 10, 10) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("ratio", "steps", "warmup"), [(0.07, 100, 7), (0.07, 101, 8), (0.5, 3, 2), (0.0, 20, 0)])
def test_a_share_of_the_steps_is_rounded_up(ratio: float, steps: int, warmup: int) -> None:
    config = LinearSchedulerConfig(warmup_ratio=ratio, decay_steps=0 if warmup else 10)
    assert rates(config, steps, warmup + 1).index(1) == warmup


def test_constant_needs_no_end() -> None:
    assert rates(ConstantSchedulerConfig(), None, 3, lr=0.5) == [0.5] * 3


@pytest.mark.parametrize(
    ("config", "max_steps", "named"),
    [
        (LinearSchedulerConfig(warmup_steps=0, decay_steps=0), 10, "warmup_steps"),
        (LinearSchedulerConfig(warmup_steps=0, decay_steps=5), None, "max_steps"),
        (LinearSchedulerConfig(warmup_steps=6, decay_steps=5), 10, "do not fit"),
        (CosineSchedulerConfig(warmup_steps=1), None, "max_steps"),
        (CosineSchedulerConfig(warmup_steps=5), 5, "warmup_steps"),
    ],
)
def test_a_schedule_that_cannot_fit_is_refused(config: SchedulerConfig, max_steps: int | None, named: str) -> None:
    with pytest.raises(TrainerError, match=named):
        rates(config, max_steps, 0)
