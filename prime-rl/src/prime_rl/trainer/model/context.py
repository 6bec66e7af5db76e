"""Divides the tokens of a packed row among processes: context parallelism, `model.cp`.

Every process computes a slice of the row's tokens, and scores those. Two kinds of layers need more than a slice:

Attention reads whole sequences. An all-to-all before it gives a process all tokens of some of the heads, and another
one after it gives the process its own tokens of all heads (Jacobs et al. 2023, DeepSpeed Ulysses). What lies between is
the attention function as it is, so masks, windows, shared prefixes and kernels stay right.

Layers that carry a state from token to token exchange columns of their projections likewise: heads of a gated delta
rule or a state space, and channels of a convolution, are independent (`hybrids.py`). Those of other kinds run on the
whole row in every process, which then keeps its slice.

Shapes: N tokens of a row, n = N / `size` of them in this process, H heads, h = H / `size`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from prime_rl.trainer.process.mesh import ContextAxis
from prime_rl.trainer.versions import gather_dim

Attention = Callable[..., tuple[Tensor, Tensor | None]]
"""A function behind Transformers' attention interface: [B, heads, T, D] in, [B, T, heads, D] out."""


def over_context(attention: Attention) -> Attention:
    """`attention` that takes slices of a row, and returns them, where the option `context` is a `ContextAxis`."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        context: ContextAxis | None = options.pop("context", None)
        if context is None:
            return attention(module, query, key, value, attention_mask, **options)
        if options.get("s_aux") is not None:
            options["s_aux"] = options["s_aux"].chunk(context.size)[context.rank]
        query, key, value = (whole_tokens(states, context) for states in (query, key, value))
        attended, _ = attention(module, query, key, value, attention_mask, **options)
        return whole_heads(attended, context), None

    return attend


def whole_tokens(states_1HnD: Tensor, axis: ContextAxis) -> Tensor:
    """This process's heads of all tokens: [1, h, N, D]. Of fewer heads than processes, each is repeated. Collective."""
    states = states_1HnD[0]
    # Query heads are shared out in order, and so are the heads that they read if their number is a multiple of `size`.
    repeats = axis.size // math.gcd(len(states), axis.size)
    states = states.repeat_interleave(repeats, 0) if repeats > 1 else states
    received = all_to_all_single_autograd(states.contiguous(), None, None, axis.group)
    return received.unflatten(0, (axis.size, -1)).transpose(0, 1).flatten(1, 2)[None]


def whole_heads(attended_1NhE: Tensor, axis: ContextAxis) -> Tensor:
    """All heads of this process's tokens: [1, n, H, E]. Collective."""
    received = all_to_all_single_autograd(attended_1NhE[0].contiguous(), None, None, axis.group)
    return received.unflatten(0, (axis.size, -1)).transpose(0, 1).flatten(1, 2)[None]


def own_slice(states: Tensor, axis: ContextAxis, dim: int) -> Tensor:
    """This process's part of a row that all processes have."""
    return states.chunk(axis.size, dim)[axis.rank]


def whole_row(states_1nH: Tensor, axis: ContextAxis) -> Tensor:
    """The row [1, N, H] of every process's part. Collective."""
    return gather_dim(states_1nH.contiguous(), 1, axis.group)


def total(parts: Tensor | tuple[Tensor, ...], picks_m: Tensor, count: int, axis: ContextAxis) -> Any:
    """What the processes scored together: numbers are added, tensors of `m` tokens become one of `count` tokens.

    Every process then computes the same loss, and the gradient of the process's own parts, `axis.size` times: its
    average over processes is the row's gradient, as it is where they compute the whole row. Collective.
    """
    if isinstance(parts, tuple):
        return tuple(total(part, picks_m, count, axis) for part in parts)
    if parts.ndim > 0:
        parts = parts.new_zeros(count, *parts.shape[1:]).index_copy(0, picks_m, parts)
    return _Total.apply(parts, axis)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, axis: ContextAxis) -> Tensor:
        ctx.size = axis.size
        summed = parts.clone()
        dist.all_reduce(summed, group=axis.group)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.size, None


def with_mean_gradient(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same states, which all processes of a group have, for each of them to score a part. Collective, backward.

    `total` gives each part the gradient that is right after an average over all that share the row. Behind the states
    are layers that these processes compute together, and there is no average over them.
    """
    return _MeanGradient.apply(states, group)


class _MeanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        mean = (grad / dist.get_world_size(ctx.group)).contiguous()
        dist.all_reduce(mean, group=ctx.group)
        return mean, None


def padded_length(length: int, axis: ContextAxis | None) -> int:
    """The length of a row that can be divided."""
    return length if axis is None else -(-length // axis.size) * axis.size


def own_tokens(places_M: Tensor, length: int, axis: ContextAxis) -> tuple[Tensor, Tensor]:
    """Which of the scored tokens are in this process's slice, and where; `places_M` are their places in the row."""
    own = length // axis.size
    picks_m = (places_M.div(own, rounding_mode="floor") == axis.rank).nonzero()[:, 0]
    return picks_m, places_M[picks_m] - axis.rank * own
