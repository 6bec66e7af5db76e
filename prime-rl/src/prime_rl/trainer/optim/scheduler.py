"""Learning-rate schedules: constant, linear, cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from prime_rl.configs.optim import schedule_faults, warmup_of
from prime_rl.configs.trainer import (
    CosineSchedulerConfig,
    LinearSchedulerConfig,
    SchedulerConfig,
)
from prime_rl.trainer.process.errors import TrainerError

_SMALLEST_FACTOR = 1e-8
"""First factor of a warm-up if `min_lr` is 0, since an update with a rate of 0 would be wasted."""


def setup_scheduler(config: SchedulerConfig, optimizer: Optimizer, max_steps: int | None) -> LambdaLR:
    """A schedule over `max_steps` updates of `optimizer`. Step it once after each update.

    Raises:
        TrainerError: warm-up and decay do not fit into `max_steps`, or the schedule needs `max_steps`.
    """
    lr = optimizer.defaults["lr"]
    for fault in schedule_faults(config, max_steps):
        raise TrainerError(fault)
    match config:
        case LinearSchedulerConfig():
            span = Span(warmup_of(config, max_steps), max_steps, config.decay_steps)
            factor = partial(linear_factor, span, config.min_lr / lr if config.min_lr and lr else _SMALLEST_FACTOR)
        case CosineSchedulerConfig():
            span = Span(warmup_of(config, max_steps), max_steps)
            factor = partial(cosine_factor, span, config.min_lr / lr if lr else 0.0)
        case _:
            return LambdaLR(optimizer, lambda update: 1.0)
    return LambdaLR(optimizer, factor)


def continue_schedule(scheduler: LambdaLR, updates: int) -> None:
    """Move a new schedule to where it stands after `updates` updates, and set the learning rates of its optimizer."""
    factors = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    rates = [base * factor(updates) for base, factor in factors]
    scheduler.load_state_dict(
        {**scheduler.state_dict(), "last_epoch": updates, "_step_count": updates + 1, "_last_lr": rates}
    )
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@dataclass(frozen=True, slots=True)
class Span:
    """The steps of a schedule."""

    warmup: int
    total: int | None
    """None if training goes on until it is stopped."""
    decay: int = 0
    """Steps at the end of a linear schedule."""


def linear_factor(span: Span, floor: float, update: int) -> float:
    """Factor of `lr` at the 0-based `update`: rises from `floor` to 1, stays, and falls to `floor` at the last update.

    With W warm-up steps, D decay steps and M steps in all: `floor + (1 - floor) n / W` below W; 1 until M - D; then
    `1 - (1 - floor) (n - (M - D)) / (D - 1)`. With D = 1 only the last update is at `floor`.
    """
    if update < span.warmup:
        return floor + (1 - floor) * update / span.warmup
    if span.total is None or span.decay == 0 or update < span.total - span.decay:
        return 1.0
    into_decay = min(update, span.total - 1) - (span.total - span.decay)
    share = into_decay / (span.decay - 1) if span.decay > 1 else 1.0
    return 1 - (1 - floor) * share


def cosine_factor(span: Span, floor: float, update: int) -> float:
    """Factor of `lr` at the 0-based `update`: a linear warm-up, then `floor + (1 - floor) / 2 (1 + cos(pi x))`.

    x runs from 0 at the end of the warm-up to 1 at the total number of steps, one past the last update.
    """
    assert span.total is not None, "schedule_faults refuses a cosine without an end"
    if update < span.warmup:
        start = floor or _SMALLEST_FACTOR
        return start + (1 - start) * update / span.warmup
    x = (min(update, span.total) - span.warmup) / (span.total - span.warmup)
    return floor + (1 - floor) / 2 * (1 + math.cos(math.pi * x))
