"""Samples and distributions for W&B, every few steps."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from prime_rl.configs.shared import LogExtrasConfig
from prime_rl.orchestrator.batch import Batch
from prime_rl.orchestrator.metrics import sample_text
from prime_rl.orchestrator.rollout import Rollout

COLUMNS = ("step", "task", "example_id", "messages", "input_ids", "reward")
MAX_SAMPLES = 8


class ExtrasMonitor(Protocol):
    """W&B, as needed here."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None: ...

    def log_distributions(self, values: Mapping[str, Sequence[float]], step: int) -> None: ...


class Extras:
    """What `log_extras` asks for: a table of a few rollouts, and histograms of rewards and advantages."""

    def __init__(self, monitor: ExtrasMonitor, config: LogExtrasConfig) -> None:
        self.monitor = monitor
        self.config = config

    def record(self, batch: Batch, step: int) -> None:
        """Report the batch of `step`, if it is one of those that are reported."""
        if step % self.config.interval:
            return
        rollouts = batch.rollouts
        if self.config.samples:
            # A choice of its own, so that looking at samples does not disturb what is sampled.
            chosen = random.Random(step).sample(rollouts, min(MAX_SAMPLES, len(rollouts)))
            self.monitor.log_table("samples", COLUMNS, [sample_row(each, step) for each in chosen], step)
        if self.config.distributions:
            values = {
                "distributions/rewards": [rollout.reward for rollout in rollouts],
                "distributions/advantages": [rollout.advantage or 0.0 for rollout in rollouts],
            }
            self.monitor.log_distributions(values, step)


def sample_row(rollout: Rollout, step: int) -> list[Any]:
    """One row of the table; the token ids are those of the last model call."""
    ids = rollout.turns[-1].prompt_ids + rollout.turns[-1].completion_ids if rollout.turns else []
    return [step, rollout.example.env, rollout.example.row, sample_text(rollout), str(ids), rollout.reward]
