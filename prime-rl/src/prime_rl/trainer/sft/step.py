"""One optimizer step of SFT."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from prime_rl.run.process import own_beats
from prime_rl.trainer.checkpoints.state import TrainState
from prime_rl.trainer.model.blocks import accumulated
from prime_rl.trainer.model.scoring import LogitsOf, cross_entropy_sum, score_tokens
from prime_rl.trainer.optim.optimizer import clip_gradients
from prime_rl.trainer.process.errors import DivergedError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.process.world import Process, sum_over_processes
from prime_rl.trainer.sft.data.packer import PackedRow
from prime_rl.trainer.sft.reporting import StepStats
from prime_rl.transport.weights import to_device


def train_step(state: TrainState, rows: Sequence[PackedRow], max_norm: float, mesh: Mesh) -> StepStats:
    """Update the model on `rows`, the micro-batches of this process's data rank. A collective call.

    The loss is the mean over the trained tokens of all data ranks, so it does not depend on how rows are divided.

    Raises:
        DivergedError: loss or gradient is not finite. Nothing has been updated.
    """
    started_s = time.perf_counter()
    own_counts = [sum(row.tokens for row in rows), sum(row.samples for row in rows), _trained(rows)]
    tokens, samples, trained_tokens = map(int, mesh.data_axis.sum(own_counts, mesh.process.device))
    own_loss = forward_backward(state.policy.model, rows, max(trained_tokens, 1), mesh)
    loss = mesh.data_axis.sum([own_loss], mesh.process.device)[0]
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
    return StepStats(loss, grad_norm, lr, tokens, samples, forward_backward_s)


def forward_backward(model: PreTrainedModel, rows: Sequence[PackedRow], trained_tokens: int, mesh: Mesh) -> float:
    """Accumulate the gradient of the mean loss. Returns the contribution of this process's rows to that loss.

    `trained_tokens` is the number over all data ranks. FSDP averages gradients over all processes, and those that share
    rows have equal gradients; multiplying by the number of data ranks makes the average the sum over rows.
    """
    process = mesh.process
    total = torch.zeros((), device=process.device)
    for row in accumulated(model, rows, process):
        own_beats().tick()
        loss_sum = row_loss_sum(model, row, process.device)
        (loss_sum * (mesh.data_axis.data_size / trained_tokens)).backward()
        total += loss_sum.detach()
    return total.item() / trained_tokens


def has_finite_weights(model: nn.Module, process: Process) -> bool:
    """Whether all weights of all processes are finite. A collective call."""
    shards = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    broken = sum(not bool(shard.isfinite().all()) for shard in shards)
    return sum_over_processes([broken], process)[0] == 0


def row_loss_sum(model: PreTrainedModel, row: PackedRow, device: torch.device) -> Tensor:
    """Sum of the cross-entropy over a row's trained tokens."""
    trained, targets, input_ids_T = (
        to_device(torch.from_numpy(values), device)
        for values in (np.flatnonzero(row.is_trained), row.target_ids[row.is_trained], row.input_ids)
    )

    def score(hidden_TH: Tensor, logits_of: LogitsOf) -> Tensor:
        return cross_entropy_sum(hidden_TH[trained], targets, logits_of, model.config.get_text_config().vocab_size)

    return score_tokens(model, input_ids_T[None], torch.from_numpy(row.position_ids)[None], score)


def _trained(rows: Sequence[PackedRow]) -> int:
    return sum(int(row.is_trained.sum()) for row in rows)
