"""Distillation from the likeliest tokens of a teacher: `[trainer.distillation]` of RL, `[distillation]` of SFT."""

from __future__ import annotations

from pydantic import Field

from prime_rl.utils.pydantic_config import BaseConfig

MAX_TOP_K = 1024
"""Most tokens at each place. A server's answer has about 60 bytes for each, a batch 8."""


class DistillationConfig(BaseConfig):
    """Moves the model's distribution at each place to the teacher's, over the teacher's likeliest tokens (GKD)."""

    beta: float = Field(0.5, ge=0, le=1)
    """0: forward KL, KL(teacher || model). 1: reverse KL, KL(model || teacher). Between: the generalized Jensen-Shannon
    divergence, as `beta` of TRL's `GKDTrainer`."""

    weight: float = Field(1.0, gt=0)
    """Weight of the divergence's mean over trained tokens, beside the rest of the loss."""

    top_k: int = Field(64, ge=1, le=MAX_TOP_K)
    """Number of the teacher's likeliest tokens at each place. All others count as one."""


class SFTDistillationConfig(DistillationConfig):
    """Trains on the teacher's distribution at each trained token of the data, in place of the token alone."""

    teacher: str
    """The teacher: a folder or a hub id, with the same tokenizer. It is a frozen second model in the trainer's
    processes, sharded as the trained one, in the compute dtype."""

    sft_coef: float = Field(0.0, ge=0)
    """Weight of the cross-entropy of the data's tokens, beside the divergence."""
