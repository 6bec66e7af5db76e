"""Attention of a packed row on a CPU, written as batched matrix products over blocks of sequences.

A block has queries of C sequences of similar length, and the keys before their end. Its scores fit into a core's cache,
and what a causal mask would discard is mostly not computed. Each token attends once, even if several sequences share
it. The backward pass computes the probabilities again, so only queries, keys and values are kept. In bfloat16,
PyTorch's flash kernels take twice the time forward and up to six times backward; in float32 they are equally fast.
Shapes: N nodes (tokens that are computed), W keys and Q queries of each of C sequences, H query heads in G groups of R
heads, D head dim of queries and keys, E head dim of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Block:
    """Queries of C sequences that are computed at once, and the keys that they may attend to."""

    nodes_CW: Tensor
    """Nodes of the first W tokens of each sequence. Padding on the right is any node: no used query sees it."""
    first: int
    """Column of the first query. The last query may be in the padding."""
    targets_CQ: Tensor
    """Node of each query; N if the query's result is not used, because of padding or because another block has it."""

    @property
    def query_nodes_CQ(self) -> Tensor:
        return self.nodes_CW[:, self.first : self.first + self.targets_CQ.shape[1]]

    def mask(self, like: Tensor, groups: int, window: int | None) -> Tensor:
        """Additive mask [groups * Q, W]: causal, and limited to the last `window` tokens."""
        columns = torch.arange(self.nodes_CW.shape[1])
        rows = torch.arange(self.first, self.first + self.targets_CQ.shape[1])[:, None]
        hidden = columns > rows
        if window is not None:
            hidden |= columns <= rows - window
        return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -torch.inf).repeat(groups, 1)


def attend_blocks(
    q_NHD: Tensor, k_NGD: Tensor, v_NGE: Tensor, blocks: Sequence[Block], scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of every node to the tokens of its sequence up to itself. Returns [N, H, E].

    Nodes that are no block's target get zeros. Grouped-query attention: each of the G key-value heads serves R = H / G
    consecutive query heads.
    """
    return _BlockedAttention.apply(q_NHD, k_NGD, v_NGE, blocks, scale, window)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], scale: float, window: int | None
    ) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        out = q.new_zeros(len(q) + 1, q.shape[1], v.shape[2])
        for block in blocks:
            probabilities = _probabilities(block, q, k, scale, window)
            mixed = torch.bmm(probabilities, _gather(v, block.nodes_CW))
            out.index_copy_(0, block.targets_CQ.flatten(), _ungroup(mixed, block, groups))
        ctx.save_for_backward(q, k, v)
        ctx.blocks, ctx.scale, ctx.window = blocks, scale, window
        return out[:-1]

    @staticmethod
    def backward(ctx: Any, grad_NHE: Tensor) -> tuple[Tensor | None, ...]:
        """Dao et al. 2022 (FlashAttention), appendix B.2, block by block."""
        q, k, v = ctx.saved_tensors
        groups = q.shape[1] // k.shape[1]
        grad = torch.cat((grad_NHE, grad_NHE.new_zeros(1, *grad_NHE.shape[1:])))  # results that are not used: zeros
        grad_q = q.new_zeros(len(q) + 1, *q.shape[1:])
        grad_k, grad_v = (torch.zeros(states.shape, dtype=torch.float32) for states in (k, v))
        for block in ctx.blocks:
            p = _probabilities(block, q, k, ctx.scale, ctx.window)
            of_out = _gather(grad, block.targets_CQ, groups)
            _add(grad_v, block, torch.bmm(p.transpose(1, 2), of_out))
            of_p = torch.bmm(of_out, _gather(v, block.nodes_CW).transpose(1, 2))
            of_scores = torch._softmax_backward_data(of_p, p, -1, p.dtype)
            of_q = torch.bmm(of_scores, _gather(k, block.nodes_CW)).mul_(ctx.scale)
            grad_q.index_copy_(0, block.targets_CQ.flatten(), _ungroup(of_q, block, groups))
            queries = _gather(q, block.query_nodes_CQ, groups)
            _add(grad_k, block, torch.bmm(of_scores.transpose(1, 2), queries).mul_(ctx.scale))
            del p, of_p, of_scores  # before the next block's: in float32 64 MB each
        return grad_q[:-1], grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def _probabilities(block: Block, q: Tensor, k: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention probabilities [C * G, R * Q, W]."""
    groups = q.shape[1] // k.shape[1]
    queries, keys = _gather(q, block.query_nodes_CQ, groups), _gather(k, block.nodes_CW)
    mask = block.mask(q, groups, window)
    return torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale).softmax(-1)


def _gather(states_NHD: Tensor, nodes_CL: Tensor, groups: int = 1) -> Tensor:
    """States of the nodes: [C * H / groups, groups * L, D]."""
    count, length = nodes_CL.shape
    found = states_NHD.index_select(0, nodes_CL.flatten())
    by_head = found.view(count, length, -1, groups, found.shape[-1]).permute(0, 2, 3, 1, 4)
    return by_head.reshape(-1, groups * length, found.shape[-1])


def _ungroup(states: Tensor, block: Block, groups: int) -> Tensor:
    """The inverse of `_gather` for a block's queries: [C * G, R * Q, D] to [C * Q, H, D]."""
    count, length = block.targets_CQ.shape
    by_token = states.view(count, -1, groups, length, states.shape[-1]).permute(0, 3, 1, 2, 4)
    return by_token.reshape(count * length, -1, states.shape[-1])


def _add(total_NGD: Tensor, block: Block, part: Tensor) -> None:
    """Add the gradients [C * G, W, D] of a block's keys or values to those of their nodes."""
    count, width = block.nodes_CW.shape
    by_token = part.view(count, -1, width, part.shape[-1]).transpose(1, 2).to(total_NGD.dtype)
    total_NGD.index_add_(0, block.nodes_CW.flatten(), by_token.reshape(count * width, -1, part.shape[-1]))
