"""Attention over a packed row on a CPU, computed per sequence.

This needs no mask and skips the work that a mask would discard. The forward pass uses PyTorch's flash kernel. The
backward pass is written as five batched matrix products, which take half the time of PyTorch's backward kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from prime_rl.trainer.model.packed_rows import layout_cost, sequence_bounds

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_LOG2_E = math.log2(math.e)
_CALLS_FLOP = 15_000_000
"""Overhead per sequence and block, as the FLOP that a core could compute in that time."""
_ADVANTAGE = 1.15
"""Minimum speed-up over PyTorch's kernels for a row of the same cost, measured at 512 tokens and H = 576."""


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Lengths of the consecutive sequences in a packed row, for attention per sequence."""

    lengths: list[int]

    def cost(self, hidden_size: int) -> int:
        """Estimated cost, in the units of `layout_cost`."""
        calls = len(self.lengths) * _CALLS_FLOP // (4 * hidden_size)
        products = sum(layout_cost(length, length, hidden_size) for length in self.lengths)
        return int((products + calls) / _ADVANTAGE)

    def options(self) -> dict[str, Any]:
        """Model arguments for the attention function. The empty mask keeps Transformers from building one."""
        return {"attention_mask": torch.empty(1, 1, 1, 1, dtype=torch.bool), "sequence_lengths": self.lengths}


def find_sequence_layout(position_ids_1T: Tensor, config: PretrainedConfig) -> SequenceLayout | None:
    """The sequences of a row, or None if the model has a window shorter than a sequence."""
    bounds, longest = sequence_bounds(position_ids_1T)
    if (getattr(config, "sliding_window", None) or longest) < longest:
        return None
    return SequenceLayout(bounds.diff().tolist())


def attend_per_sequence(q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Causal attention within each of the consecutive sequences of `lengths` tokens. Returns [T, H, D].

    Grouped-query attention: each of the G key-value heads serves H / G consecutive query heads.
    """
    return _PerSequenceAttention.apply(q_HTD, k_GTD, v_GTD, lengths, scale)


class _PerSequenceAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
        out = q.new_empty(q.shape[1], q.shape[0], v.shape[2])
        logsumexp = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        start = 0
        for length in lengths:
            one = slice(start, start + length)
            found, its_logsumexp = _flash(
                q[None, :, one], k[None, :, one], v[None, :, one], is_causal=True, scale=scale
            )
            out[one] = found[0].transpose(0, 1)
            logsumexp[one] = its_logsumexp[0].transpose(0, 1)
            start += length
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.lengths, ctx.scale = lengths, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        grads = [torch.empty_like(states.transpose(0, 1)).transpose(0, 1) for states in (q, k, v)]
        start = 0
        for length in ctx.lengths:
            one = slice(start, start + length)
            parts = (grad_THD[one], q[:, one], k[:, one], v[:, one], out[one], logsumexp[one])
            for grad, part in zip(grads, _sequence_backward(*parts, ctx.scale), strict=True):
                grad[:, one] = part
            start += length
        return *grads, None, None


def _sequence_backward(
    grad_LHD: Tensor,
    q_HLD: Tensor,
    k_GLD: Tensor,
    v_GLD: Tensor,
    out_LHD: Tensor,
    logsumexp_LH: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one sequence's queries, keys and values (Dao et al. 2022, appendix B.2, with a single block)."""
    heads, length, width = q_HLD.shape
    groups = k_GLD.shape[0]
    by_group = (groups, -1, width)
    q, grad = q_HLD.reshape(by_group), grad_LHD.transpose(0, 1).reshape(by_group)
    scores = torch.bmm(q, k_GLD.transpose(1, 2)).view(heads, length, length).float()
    # exp2 is cheaper than exp. The causal mask is applied last, because exp2 is slow for -inf.
    p = scores.mul_(scale * _LOG2_E).sub_(logsumexp_LH.t()[..., None] * _LOG2_E).exp2_().tril_()
    of_group = (groups, -1, length)
    grad_v = torch.bmm(p.to(q.dtype).view(of_group).transpose(1, 2), grad)
    product = (grad_LHD.float() * out_LHD.float()).sum(-1).t()[..., None]
    grad_p = torch.bmm(grad, v_GLD.transpose(1, 2)).view(heads, length, length).float()
    grad_scores = grad_p.sub_(product).mul_(p).mul_(scale).to(q.dtype).view(of_group)
    return torch.bmm(grad_scores, k_GLD).view(q_HLD.shape), torch.bmm(grad_scores.transpose(1, 2), q), grad_v
