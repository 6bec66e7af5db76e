"""Demonstrations that RL imitates beside its rollouts: `[trainer.demonstrations]`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.data import SFTDataConfig, TokenLoss
from prime_rl.configs.ranges import Count, WholeNumber
from prime_rl.utils.pydantic_config import BaseConfig, raise_faults


class DemonstrationDataConfig(SFTDataConfig):
    """The rows, as in `[data]` of SFT. `seq_len` is that of the trainer unless it is set."""

    batch_size: Count = 8
    """Packed sequences per optimizer update, over all ranks."""


class DemonstrationsConfig(BaseConfig):
    """Rows that the policy imitates beside its rollouts: each update adds `weight` times the mean cross-entropy of
    their trained tokens to the loss (CHORD)."""

    data: DemonstrationDataConfig = DemonstrationDataConfig()
    """The rows. `name` or `sources` must be set."""

    weight: float = Field(0.1, ge=0)
    """Weight of the cross-entropy; with `anneal_steps` that of the first step after `warmup_steps`."""

    final_weight: float = Field(0.0, ge=0)
    """Weight after `anneal_steps`. 0 then reads no more rows."""

    anneal_steps: Count | None = None
    """Number of steps in which the weight goes from `weight` to `final_weight`, as half a cosine. None keeps
    `weight`."""

    warmup_steps: WholeNumber = 0
    """Number of steps before, in which the weight grows linearly from 0 to `weight`."""

    combine: Literal["add", "share"] = "add"
    """`add`: RL's loss + weight x cross-entropy. `share`: (1 - weight) x RL's loss + weight x cross-entropy, as in
    CHORD."""

    loss: TokenLoss = "cross_entropy"
    """`phi` weights the cross-entropy of each token by p (1 - p), p its probability, as a constant (CHORD): tokens that
    the policy is sure of, or finds impossible, pull less. `dft` weights it by p."""

    def weight_at(self, step: int) -> float:
        """The weight in a step, counted from 0."""
        if step < self.warmup_steps:
            return self.weight * step / self.warmup_steps
        if self.anneal_steps is None:
            return self.weight
        done = min(1.0, (step - self.warmup_steps) / self.anneal_steps)
        return self.final_weight + (self.weight - self.final_weight) * (1 + math.cos(math.pi * done)) / 2

    def rl_weight_at(self, step: int) -> float:
        """What RL's loss is multiplied by in a step."""
        return 1.0 - self.weight_at(step) if self.combine == "share" else 1.0

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        self.data.name_section("trainer.demonstrations.data")
        raise_faults(list(self._faults()))
        return self

    def _faults(self) -> Iterator[str]:
        if self.data.sources is None and "name" not in self.data.model_fields_set:
            yield "data.name is not set: name the rows to imitate"
        if self.anneal_steps is None and "final_weight" in self.model_fields_set and self.final_weight:
            yield f"final_weight ({self.final_weight:g}) needs anneal_steps"
        if self.combine == "share" and (most := max(self.weight, self.final_weight)) > 1:
            yield f"combine = 'share' needs weights of at most 1 (got {most:g})"
        if self.weight == 0 and (self.anneal_steps is None or self.final_weight == 0):
            yield "weight = 0 trains on no row: set it above 0, or remove [trainer.demonstrations]"
