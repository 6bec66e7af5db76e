"""Flash attention with the bounds of several sequences, and its gradient, in float32.

The gradient is dS = P * (dP - D) with D = rowsum(dO * O): Dao, FlashAttention-2 (2023), Algorithm 2.
Shapes: T tokens of all sequences, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)
_KERNELS = torch.library.Library("aten", "IMPL")


class _Sequence(NamedTuple):
    queries: slice
    keys: slice
    is_seen: Tensor
    """Which keys each query attends to, [Q, K]."""


def _sequences(
    bounds_q: Tensor, bounds_k: Tensor, is_causal: bool, left: int | None, right: int | None
) -> Iterator[_Sequence]:
    for (q0, q1), (k0, k1) in zip(_pairs(bounds_q), _pairs(bounds_k), strict=True):
        query, key = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0), torch.arange(k1 - k0)[None]
        is_seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        if is_causal or right == 0:
            is_seen &= key <= query
        if left is not None and left >= 0:
            is_seen &= key >= query - left
        yield _Sequence(slice(q0, q1), slice(k0, k1), is_seen)


def _pairs(bounds: Tensor) -> list[tuple[int, int]]:
    values = bounds.tolist()
    return list(pairwise(values))


def _check(query: Tensor, bounds: Tensor, longest: int) -> None:
    if query.dtype not in _HALF:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if bounds.dtype != torch.int32 or not bounds.is_cuda:
        raise RuntimeError("cu_seqlens_q must have dtype int32, on the GPU")
    lengths = torch.ops.simulated_gpu.on_host(bounds).diff()
    if int(lengths.max()) > longest:
        raise RuntimeError(f"a sequence of {int(lengths.max())} tokens is longer than max_q = {longest}")


def forward(  # noqa: PLR0913 - the operator's own signature
    query: Tensor, key: Tensor, value: Tensor, bounds_q: Tensor, bounds_k: Tensor, longest_q: int, longest_k: int,
    dropout: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check(query, bounds_q, longest_q)
    q, k, v, of_q, of_k = map(torch.ops.simulated_gpu.on_host, (query, key, value, bounds_q, bounds_k))
    scale, group = scale or q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    out, log_sum_HT = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for sequence in _sequences(of_q, of_k, is_causal, window_size_left, window_size_right):
        own_k, own_v = (part[sequence.keys].float().repeat_interleave(group, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[sequence.queries].float(), own_k) * scale
        scores = scores.masked_fill(~sequence.is_seen, -torch.inf)
        out[sequence.queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), own_v).to(q.dtype)
        log_sum_HT[:, sequence.queries] = scores.logsumexp(-1)
    random = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return tuple(map(torch.ops.simulated_gpu.to_gpu, (out, log_sum_HT, *random, torch.empty(0))))


def backward(  # noqa: PLR0913 - the operator's own signature
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_HT: Tensor, bounds_q: Tensor,
    bounds_k: Tensor, longest_q: int, longest_k: int, dropout: float, is_causal: bool, *random: Tensor,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    tensors = (grad, query, key, value, out, log_sum_HT, bounds_q, bounds_k)
    g, q, k, v, o, log_sum, of_q, of_k = map(torch.ops.simulated_gpu.on_host, tensors)
    scale, group = scale or q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    grad_q, grad_k, grad_v = (torch.zeros(part.shape) for part in (q, k, v))
    for sequence in _sequences(of_q, of_k, is_causal, window_size_left, window_size_right):
        own_q, own_o, own_g = (part[sequence.queries].float() for part in (q, o, g))
        own_k, own_v = (part[sequence.keys].float().repeat_interleave(group, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", own_q, own_k) * scale
        p = (scores.masked_fill(~sequence.is_seen, -torch.inf) - log_sum[:, sequence.queries, None]).exp()
        d_p = torch.einsum("qhd,khd->hqk", own_g, own_v)
        d_s = p * (d_p - (own_g * own_o).sum(-1).T[..., None]) * scale
        grad_q[sequence.queries] = torch.einsum("hqk,khd->qhd", d_s, own_k)
        # Query heads of a group share a key and a value head.
        for total, own in (
            (grad_k, torch.einsum("hqk,qhd->khd", d_s, own_q)),
            (grad_v, torch.einsum("hqk,qhd->khd", p, own_g)),
        ):
            total[sequence.keys] = own.unflatten(1, (-1, group)).sum(2)
    return tuple(torch.ops.simulated_gpu.to_gpu(made.to(query.dtype)) for made in (grad_q, grad_k, grad_v))


def install() -> None:
    _KERNELS.impl("_flash_attention_forward", forward, "CUDA")
    _KERNELS.impl("_flash_attention_backward", backward, "CUDA")
