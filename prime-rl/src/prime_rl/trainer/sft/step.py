"""One optimizer step, and what it minimises."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from prime_rl.configs.data import TokenLoss
from prime_rl.configs.distillation import SFTDistillationConfig
from prime_rl.run.process import own_beats
from prime_rl.trainer.checkpoints.state import TrainState
from prime_rl.trainer.distillation import TopTokens, divergences, likeliest_tokens
from prime_rl.trainer.model.blocks import accumulated
from prime_rl.trainer.model.images import Images
from prime_rl.trainer.model.scoring import LogitsOf, cross_entropy_sum, score_tokens, seeing
from prime_rl.trainer.optim.optimizer import clip_gradients
from prime_rl.trainer.process.errors import DivergedError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.process.world import Process, sum_over_processes
from prime_rl.trainer.sft.data.packer import PackedRow
from prime_rl.trainer.sft.reporting import StepStats
from prime_rl.transport.weights import to_device


@dataclass(frozen=True, slots=True)
class RowSums:
    """What one row adds to the means of a step."""

    losses: Sequence[Tensor]
    """One sum for each of the objective's `weights`, with its gradient."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Sums without gradient, by the metric's name. Their means are over the first of `sizes`."""
    shares: Mapping[str, Tensor] = field(default_factory=dict)
    """What the row adds to other metrics, which are the sums over all rows of all data ranks."""


class Objective(Protocol):
    """What a run minimises: the weighted sum of one or more means over the rows of all data ranks.

    SFT has one mean, over trained tokens. DPO has a mean over pairs, and may add one over the chosen tokens. Sums and
    what they are divided by are separate, so that the loss does not depend on how rows are divided among processes.
    """

    @property
    def weights(self) -> Sequence[float]:
        """Weight of each mean."""

    def sizes(self, row: PackedRow) -> Sequence[int]:
        """How much the row adds to the divisor of each mean."""

    def prepare(self, model: PreTrainedModel, rows: Sequence[PackedRow], mesh: Mesh) -> None:
        """Find what the loss of each row needs to know of all rows, before the first call of `sums`. A collective call:
        `rows` are this data rank's."""
        return

    def sums(self, model: PreTrainedModel, row: PackedRow, device: torch.device) -> RowSums:
        """Run the row forward. Each rank calls it as often, because sharded weights are gathered together."""


class CrossEntropy(Objective):
    """SFT: the mean cross-entropy of the trained tokens, each perhaps weighted by its probability."""

    def __init__(self, kind: TokenLoss = "cross_entropy", weight: float = 1.0, *, images: Images | None = None) -> None:
        self.kind = kind
        self.weight = weight
        self.images = images
        """Reads the images of rows; None if they have none."""

    @property
    def weights(self) -> Sequence[float]:
        return (self.weight,)

    def sizes(self, row: PackedRow) -> Sequence[int]:
        return (int(row.is_trained.sum()),)

    def sums(self, model: PreTrainedModel, row: PackedRow, device: torch.device) -> RowSums:
        images = None
        if (reads := self.images) is not None:
            of_sequences = ((each.token_ids[:-1] == reads.reader.token_id, each.images) for each in row.sequences)
            images = reads.of_row(of_sequences, len(row.input_ids))
        with seeing(model, images):
            return RowSums((row_loss_sum(model, row, device, self.kind),))


class Distilled(Objective):
    """SFT with a teacher: the mean divergence of the trained tokens from its distribution, perhaps beside their mean
    cross-entropy."""

    def __init__(self, config: SFTDistillationConfig, kind: TokenLoss = "cross_entropy") -> None:
        self.config = config
        self.teacher: PreTrainedModel | None = None
        """A frozen, sharded model. Set before the first step."""
        self.kind = kind
        self._tops: dict[int, tuple[Tensor, Tensor]] = {}
        """Ids and log-probabilities [M, k] of the teacher's likeliest tokens at the trained tokens of each row."""

    @property
    def weights(self) -> Sequence[float]:
        return (self.config.weight, self.config.sft_coef) if self.config.sft_coef else (self.config.weight,)

    def sizes(self, row: PackedRow) -> Sequence[int]:
        return (int(row.is_trained.sum()),) * len(self.weights)

    def prepare(self, model: PreTrainedModel, rows: Sequence[PackedRow], mesh: Mesh) -> None:
        assert self.teacher is not None, "loaded before the first step"
        ours, theirs = (each.config.get_text_config().vocab_size for each in (model, self.teacher))

        def score(hidden_MH: Tensor, logits_of: LogitsOf) -> tuple[Tensor, Tensor]:
            # Rows of embeddings beyond the model's own are padding: no token has them.
            return likeliest_tokens(hidden_MH, lambda hidden: logits_of(hidden)[:, :ours], self.config.top_k, theirs)

        self._tops.clear()
        with torch.no_grad():
            for row in rows:
                own_beats().tick()
                trained, _, input_ids_T = trained_of(row, mesh.process.device)
                positions_1T = torch.from_numpy(row.position_ids)[None]
                self._tops[id(row)] = score_tokens(self.teacher, input_ids_T[None], positions_1T, score, trained)
        # Without a backward pass its weights would stay gathered.
        cast("FSDPModule", self.teacher).reshard()

    def sums(self, model: PreTrainedModel, row: PackedRow, device: torch.device) -> RowSums:
        trained, targets, input_ids_T = trained_of(row, device)
        vocab_size = model.config.get_text_config().vocab_size

        def score(
            hidden_MH: Tensor, logits_of: LogitsOf, targets_M: Tensor, ids_MK: Tensor, logprobs_MK: Tensor
        ) -> tuple[Tensor, ...]:
            weights = torch.ones(len(targets_M), 1, device=device)
            top = TopTokens(ids_MK[:, None], logprobs_MK[:, None], weights)
            divergence = divergences(hidden_MH, logits_of, top, self.config.beta, vocab_size).sum()
            if not self.config.sft_coef:
                return (divergence,)
            return divergence, cross_entropy_sum(hidden_MH, targets_M, logits_of, vocab_size, kind=self.kind)

        positions_1T = torch.from_numpy(row.position_ids)[None]
        losses: tuple[Tensor, ...] = score_tokens(
            model, input_ids_T[None], positions_1T, score, trained, [targets, *self._tops[id(row)]]
        )
        names = ("teacher_divergence/mean", "sft_loss/mean")
        metrics = {name: loss.detach() for name, loss in zip(names, losses, strict=False)}
        return RowSums(losses, metrics)


def train_step(
    state: TrainState, rows: Sequence[PackedRow], max_norm: float, mesh: Mesh, objective: Objective
) -> StepStats:
    """Update the model on `rows`, the micro-batches of this process's data rank. A collective call.

    Raises:
        DivergedError: loss or gradient is not finite. Nothing has been updated.
    """
    started_s = time.perf_counter()
    own_counts = [sum(row.tokens for row in rows), sum(row.samples for row in rows), *sizes_of(rows, objective)]
    tokens, samples, *sizes = map(int, mesh.data_axis.sum(own_counts, mesh.process.device))
    objective.prepare(state.policy.model, rows, mesh)
    own_means = forward_backward(state.policy.model, rows, objective, sizes, mesh)
    # Every rank has the same names in the same order.
    loss, *values = mesh.data_axis.sum(list(own_means.values()), mesh.process.device)
    grad_norm = clip_gradients(state.policy.model, max_norm)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise DivergedError(
            f"step {state.progress.step}: loss {loss:.4g}, gradient norm {grad_norm:.4g}: training has diverged. "
            "Lower optim.lr or lengthen the warm-up, and resume from the last checkpoint"
        )
    forward_backward_s = time.perf_counter() - started_s
    lr = float(state.policy.scheduler.get_last_lr()[0])
    state.policy.optimizer.step()
    state.policy.scheduler.step()
    state.policy.optimizer.zero_grad()
    state.progress.advance(tokens, samples)
    metrics = {**dict(zip(list(own_means)[1:], values, strict=True)), **state.policy.balanced()}
    return StepStats(loss, grad_norm, lr, tokens, samples, forward_backward_s, metrics)


def sizes_of(rows: Sequence[PackedRow], objective: Objective) -> list[int]:
    """The divisors of an objective's means over some rows."""
    return [sum(each) for each in zip(*map(objective.sizes, rows), strict=True)]


def forward_backward(
    model: PreTrainedModel, rows: Sequence[PackedRow], objective: Objective, sizes: Sequence[int], mesh: Mesh
) -> dict[str, float]:
    """Accumulate the gradient of the objective. Returns what this process's rows add to `loss` and to the metrics.

    `sizes` are the divisors over all data ranks. FSDP averages gradients over all processes, and those that share rows
    have gradients whose average is that of the row; multiplying by the number of data ranks makes it the sum over rows.
    """
    factors = [
        mesh.data_axis.data_size * weight / max(size, 1) for weight, size in zip(objective.weights, sizes, strict=True)
    ]

    def terms() -> Iterator[RowSums]:
        for row in accumulated(model, rows, mesh.process):
            own_beats().tick()
            sums = objective.sums(model, row, mesh.process.device)
            losses = [loss * factor for loss, factor in zip(sums.losses, factors, strict=True)]
            sum(losses[1:], losses[0]).backward()
            yield sums

    return means(terms(), objective, sizes)


def means(rows: Iterable[RowSums], objective: Objective, sizes: Sequence[int]) -> dict[str, float]:
    """The loss and the metrics of some rows, divided by `sizes`."""
    losses: list[Tensor] = []
    metrics: dict[str, Tensor] = {}
    for sums in rows:
        detached = [loss.detach() for loss in sums.losses]
        losses = [a + b for a, b in zip(losses, detached, strict=True)] if losses else detached
        values = {**{name: value / max(sizes[0], 1) for name, value in sums.metrics.items()}, **sums.shares}
        metrics = {name: metrics[name] + value if metrics else value for name, value in values.items()}
    # Read once, at the end: a GPU would wait at each.
    found = torch.stack([*losses, *metrics.values()]).tolist()
    divided = [
        weight * value / max(size, 1)
        for weight, value, size in zip(objective.weights, found[: len(losses)], sizes, strict=True)
    ]
    return {"loss": sum(divided), **dict(zip(metrics, found[len(losses) :], strict=True))}


def has_finite_weights(model: nn.Module, process: Process) -> bool:
    """Whether all weights of all processes are finite. A collective call."""
    shards = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    broken = sum(not bool(shard.isfinite().all()) for shard in shards)
    return sum_over_processes([broken], process)[0] == 0


def row_loss_sum(
    model: PreTrainedModel, row: PackedRow, device: torch.device, kind: TokenLoss = "cross_entropy"
) -> Tensor:
    """Sum of the cross-entropy over a row's trained tokens, each perhaps weighted by its probability."""
    trained, targets, input_ids_T = trained_of(row, device)

    def score(hidden_MH: Tensor, logits_of: LogitsOf, targets_M: Tensor) -> Tensor:
        vocab_size = model.config.get_text_config().vocab_size
        return cross_entropy_sum(hidden_MH, targets_M, logits_of, vocab_size, kind=kind)

    return score_tokens(model, input_ids_T[None], torch.from_numpy(row.position_ids)[None], score, trained, [targets])


def trained_of(row: PackedRow, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of a row: the places of its trained tokens [M], what they predict [M], and all its tokens [T]."""
    trained, targets, input_ids = (
        to_device(torch.from_numpy(values), device)
        for values in (np.flatnonzero(row.is_trained), row.target_ids[row.is_trained], row.input_ids)
    )
    return trained, targets, input_ids
