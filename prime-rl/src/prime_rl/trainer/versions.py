"""Differences between the supported releases of torch and Transformers, each in one function.

Supported: torch 2.11 to 2.13, Transformers 5.16 to 5.19.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn


def varlen_kernel() -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """PyTorch's varlen kernel, with the argument `enable_gqa`.

    Torch 2.11 has no such argument, and passes on any number of key heads, which its flash kernels support.
    """
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return varlen_attn

    def without_argument(*inputs: Any, enable_gqa: bool, **options: Any) -> Tensor | tuple[Tensor, ...]:
        return varlen_attn(*inputs, **options)

    return without_argument


def gather_dim(states: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The states of all processes in `group`, one after another along `dim`. Collective, also backward.

    Torch 2.13 renamed the function.
    """
    gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
    gathered: Tensor = gather(states, dim, group)
    return gathered


def compile_for_all_shapes(forward: Callable[..., Any], *, fullgraph: bool, recompile_limit: int) -> Callable[..., Any]:
    """Compile with dynamic shapes, and with at most `recompile_limit` graphs.

    `torch.compile` takes the limit from 2.12 on. Before, it is a setting of the process.
    """
    # The overloads of `compile` omit `recompile_limit`.
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return torch.compile(  # type: ignore[call-overload]
            forward, fullgraph=fullgraph, dynamic=True, recompile_limit=recompile_limit
        )
    torch._dynamo.config.recompile_limit = recompile_limit
    return torch.compile(forward, fullgraph=fullgraph, dynamic=True)
