"""PPO's critic: the values of tokens, generalized advantage estimation, and the update of the values.

A critic reads the same rows as the policy. Before the updates of a step it turns what tokens are worth, which the
orchestrator sends as `Row.advantages`, into advantages and returns; each update moves its values to the returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from prime_rl.configs.critic import CriticConfig
from prime_rl.run.process import own_beats
from prime_rl.trainer.checkpoints.state import TrainedModel
from prime_rl.trainer.model.scoring import LogitsOf, output_head, score_tokens
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.rl.metrics import NAN, MetricValues
from prime_rl.trainer.rl.rows import Estimates, Row, RowLayout, Sequences
from prime_rl.trainer.rl.step import trained_rows
from prime_rl.transport.loading import local

WHITENING_EPS = 1e-5
"""Added to the standard deviation of advantages."""


def gae(
    rewards: Tensor, values: Tensor, sequences: Sequences, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns by generalized advantage estimation (Schulman et al. 2016, High-Dimensional Continuous
    Control Using Generalized Advantage Estimation), of the steps of sequences that end with value 0.

        d_t = r_t + gamma * V_(t+1) - V_t
        A_t = sum over k >= 0 of (gamma * lambda)^k * d_(t+k)
        R_t = A_t + V_t
    """
    deltas = rewards + gamma * sequences.following(values) - values
    advantages = sequences.sum_from(deltas, gamma * gae_lambda)
    return advantages, advantages + values


def advantages_of(worth_M: Tensor, values_P: Tensor, layout: RowLayout, config: CriticConfig) -> tuple[Tensor, Tensor]:
    """Advantages [M] and returns [P] from what each token is worth, before normalisation, in float64.

    The reward of a token is the difference of its worth to the next one's. If all tokens of a sequence share its reward
    the last one gets it. If calls have a worth of their own, the last token of a call gets what the call adds.
    """
    worth_M, values_P = worth_M.double(), values_P.double()
    rewards_M = worth_M - layout.sequences.following(worth_M)
    if config.level == "token":
        return gae(rewards_M, values_P, layout.sequences, config.gamma, config.gae_lambda)
    rewards_N = layout.turns.sum(rewards_M)
    advantages_N, returns_N = gae(rewards_N, values_P, layout.turns_of, config.gamma, config.gae_lambda)
    return layout.turns.spread(advantages_N), returns_N


def value_losses(values: Tensor, estimates: Estimates, clip: float | None) -> tuple[Tensor, Tensor]:
    """max((V - R)^2, (V_clip - R)^2) / 2 of each place, V_clip within `clip` of the value at the step's start, and
    whether that makes it larger (Schulman et al. 2017; as AReaL, TRL and verl compute it)."""
    losses = (values - estimates.returns_P).square() / 2
    if clip is None:
        return losses, torch.zeros_like(losses)
    near = estimates.values_P + (values - estimates.values_P).clamp(-clip, clip)
    clipped = (near - estimates.returns_P).square() / 2
    return torch.maximum(losses, clipped), (clipped > losses).float()


@dataclass(frozen=True, slots=True)
class Critic:
    """A model with one value per token, and what trains it."""

    trained: TrainedModel
    config: CriticConfig
    mesh: Mesh

    @torch.no_grad()
    def with_advantages(self, rows: Sequence[Row]) -> tuple[list[Row], MetricValues]:
        """Return the rows of a step with advantages and `estimates`, and their metrics. Collective."""
        values, advantages, estimated = MetricValues(), [], []
        for row in rows:
            own_beats().tick()
            values_P = values_of(self.trained.model, row, self._places(row))
            worth_M = row.advantages.index_select(0, row.layout.trained_M)
            own, returns_P = advantages_of(worth_M, values_P, row.layout, self.config)
            advantages.append(own)
            estimated.append(Estimates(values_P, returns_P.float()))
            values.add({"critic/advantages": own, "critic/values": values_P, "critic/returns": returns_P})
        # Without a backward pass, the root's weights stay gathered.
        assert isinstance(self.trained.model, FSDPModule)
        self.trained.model.reshard()
        if self.config.whiten:
            advantages = self._whitened(advantages)
        return [
            dataclasses.replace(
                row,
                advantages=row.advantages.index_copy(0, row.layout.trained_M, own.float()),
                estimates=estimates,
            )
            for row, own, estimates in zip(rows, advantages, estimated, strict=True)
        ], values

    def run(self, rows: Sequence[Row]) -> MetricValues:
        """Accumulate the gradient of the mean value loss of an update, and return the metrics. Collective."""
        model, data_axis = self.trained.model, self.mesh.data_axis
        values = MetricValues()
        (places,) = data_axis.sum_counts([sum(len(self._places(row)) for row in rows)])
        for row in trained_rows(model, rows, self.mesh.process):
            values_P = values_of(model, row, self._places(row))
            assert row.estimates is not None
            losses_P, is_clipped = value_losses(values_P, row.estimates, self.config.value_clip)
            # FSDP averages over all processes, and those that share rows have equal gradients.
            (losses_P.sum() * (data_axis.data_size / max(1, places))).backward()
            values.add({"critic/loss": losses_P, "critic/is_clipped": is_clipped})
        return values

    def _places(self, row: Row) -> Tensor:
        """Indices of the tokens that have a value."""
        trained_M = row.layout.trained_M
        return trained_M if self.config.level == "token" else trained_M.index_select(0, row.layout.turns.first_S)

    def _whitened(self, advantages: Sequence[Tensor]) -> list[Tensor]:
        """The advantages of all tokens of a step, on all ranks, with mean 0 and standard deviation 1. Collective."""
        device, axis = self.mesh.process.device, self.mesh.data_axis
        own = [sum(each.sum().item() for each in advantages), sum(each.numel() for each in advantages)]
        total, count = axis.sum(own, device)
        mean = total / max(count, 1)
        (squares,) = axis.sum([sum((each - mean).square().sum().item() for each in advantages)], device)
        scale = (squares / (count - 1)) ** 0.5 + WHITENING_EPS if count > 1 else 1.0
        return [(each - mean) / scale for each in advantages]


def explained_variance(values: Mapping[str, Tensor]) -> dict[str, float]:
    """The share of the variance of a step's returns that the values explain, from the metrics of `with_advantages`;
    nothing without any."""
    if "critic/returns" not in values:
        return {}
    errors = values["critic/returns"] - values["critic/values"]
    left, whole = (each.double().var(correction=0).item() for each in (errors, values["critic/returns"]))
    return {"critic/explained_variance": 1 - left / whole if whole else NAN}


def values_of(model: PreTrainedModel, row: Row, places_P: Tensor) -> Tensor:
    """The values before the tokens at `places_P`, float32 [P]: what follows is not known yet."""

    def score(hidden_PH: Tensor, logits_of: LogitsOf) -> Tensor:
        return logits_of(hidden_PH).float()

    # A value is that of the token before: it is predicted there, like the token itself.
    scored = score_tokens(model, row.input_ids[None], row.position_ids[None], score, places_P - 1, uses_last=False)
    return scored[:, 0]


@torch.no_grad()
def start_at_zero(model: PreTrainedModel) -> None:
    """Set a new head to 0, so that all first values are 0 and the first advantages are those of the rewards."""
    for parameter in output_head(model).parameters():
        local(parameter).zero_()
