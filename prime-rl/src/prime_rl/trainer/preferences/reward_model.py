"""The objective of a reward model: Bradley-Terry on the rewards of both answers of each pair."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from prime_rl.configs.rm import RewardLossConfig
from prime_rl.trainer.model.scoring import LogitsOf, score_tokens
from prime_rl.trainer.sft.data.packer import PackedRow
from prime_rl.trainer.sft.step import Objective, RowSums
from prime_rl.transport.weights import to_device


class Ranking(Objective):
    """The mean over pairs of -log sigma(r(w) - r(l) - margin), plus the coefficient times the mean of (r(w) + r(l))^2.

    With rewards r of the chosen answer w and the rejected one l (Bradley and Terry 1952; Touvron et al. 2023, Llama 2,
    for the margin; Eisenstein et al. 2023, Helping or Herding, for the centring).
    """

    weights: Sequence[float] = (1.0,)

    def __init__(self, config: RewardLossConfig) -> None:
        self.config = config

    def sizes(self, row: PackedRow) -> Sequence[int]:
        return (len(row.pairs),)

    def sums(self, model: PreTrainedModel, row: PackedRow, device: torch.device) -> RowSums:
        chosen, rejected = rewards_of(model, row, device).unbind(1)
        margins = torch.tensor([pair.margin for pair in row.pairs], device=device)
        losses = -logsigmoid(chosen - rejected - margins)
        if self.config.center_rewards_coefficient:
            losses = losses + self.config.center_rewards_coefficient * (chosen + rejected) ** 2
        chosen, rejected = chosen.detach(), rejected.detach()
        metrics = {
            "accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
            "mean_reward": (chosen + rejected) / 2,
        }
        # A row without pairs keeps its graph: its backward pass takes part in collectives.
        return RowSums((losses.sum(),), {name: values.sum() for name, values in metrics.items()})


def rewards_of(model: PreTrainedModel, row: PackedRow, device: torch.device) -> Tensor:
    """The rewards of both answers of each pair, float32 [pairs, 2]."""
    scored, input_ids_T = (
        to_device(torch.from_numpy(values), device) for values in (np.flatnonzero(row.is_trained), row.input_ids)
    )

    def score(hidden_SH: Tensor, logits_of: LogitsOf) -> Tensor:
        return logits_of(hidden_SH).float()

    return score_tokens(model, input_ids_T[None], torch.from_numpy(row.position_ids)[None], score, scored).view(-1, 2)
