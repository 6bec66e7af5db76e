"""Learning-rate schedules: constant, linear, cosine."""

from __future__ import annotations

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from prime_rl.configs.optim import schedule_faults
from prime_rl.configs.trainer import CosineSchedulerConfig, LinearSchedulerConfig, SchedulerConfig
from prime_rl.trainer.process.errors import ScheduleError

_SMALLEST_FACTOR = 1e-8
"""First factor of a warm-up if `min_lr` is 0, since an update with a rate of 0 would be wasted."""


def setup_scheduler(config: SchedulerConfig, optimizer: Optimizer, max_steps: int | None) -> LambdaLR:
    """A schedule over `max_steps` updates of `optimizer`. Step it once after each update.

    Raises:
        ScheduleError: warm-up and decay do not fit into `max_steps`, or the schedule needs `max_steps`.
    """
    lr = optimizer.defaults["lr"]
    for fault in schedule_faults(config, max_steps):
        raise ScheduleError(fault)
    match config:
        case LinearSchedulerConfig():
            factor = partial(linear_factor, config, _floor(config.min_lr, lr), max_steps)
        case CosineSchedulerConfig():
            assert max_steps is not None, "schedule_faults refuses that"
            factor = partial(cosine_factor, config, config.min_lr / lr if lr else 0.0, max_steps)
        case _:
            return LambdaLR(optimizer, lambda update: 1.0)
    return LambdaLR(optimizer, factor)


def linear_factor(config: LinearSchedulerConfig, floor: float, max_steps: int | None, update: int) -> float:
    """Factor of `lr` at the 0-based `update`: rises from `floor` to 1, stays, and falls to `floor` at the last update.

    With W warm-up steps, D decay steps and M steps in all: `floor + (1 - floor) n / W` below W; 1 until M - D; then
    `1 - (1 - floor) (n - (M - D)) / (D - 1)`. With D = 1 only the last update is at `floor`.
    """
    if update < config.warmup_steps:
        return floor + (1 - floor) * update / config.warmup_steps
    if max_steps is None or config.decay_steps == 0 or update < max_steps - config.decay_steps:
        return 1.0
    into_decay = min(update, max_steps - 1) - (max_steps - config.decay_steps)
    share = into_decay / (config.decay_steps - 1) if config.decay_steps > 1 else 1.0
    return 1 - (1 - floor) * share


def cosine_factor(config: CosineSchedulerConfig, floor: float, max_steps: int, update: int) -> float:
    """Factor of `lr` at the 0-based `update`: a linear warm-up, then `floor + (1 - floor) / 2 (1 + cos(pi x))`.

    x runs from 0 at the end of the warm-up to 1 at `max_steps`, one past the last update.
    """
    if update < config.warmup_steps:
        start = floor or _SMALLEST_FACTOR
        return start + (1 - start) * update / config.warmup_steps
    x = (min(update, max_steps) - config.warmup_steps) / (max_steps - config.warmup_steps)
    return floor + (1 - floor) / 2 * (1 + math.cos(math.pi * x))


def _floor(min_lr: float, lr: float) -> float:
    return min_lr / lr if min_lr and lr else _SMALLEST_FACTOR
