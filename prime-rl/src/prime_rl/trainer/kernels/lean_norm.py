"""RMSNorm whose backward pass is a single kernel, for CPUs.

Transformers implements RMSNorm as six operations on float32 copies. Their backward pass takes a third of the time of a
block's matrix products on two cores, and keeps two float32 tensors. Here, the backward pass uses LayerNorm's kernel:
RMSNorm is LayerNorm with the mean fixed at 0, so only the gradient's mean term has to be added back.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class _PlainNorm(Protocol):
    weight: Tensor
    variance_epsilon: float


def use_lean_norms(model: nn.Module) -> None:
    """Replace the forward of the model's standard RMSNorm modules."""
    for module in model.modules():
        if _is_plain(module):
            module.forward = MethodType(_forward, module)


def rms_norm(x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """Compute `weight * x / sqrt(mean(x^2) + epsilon)` over the last dimension, with float32 statistics."""
    return _RMSNorm.apply(x, weight_H, epsilon)


class _RMSNorm(torch.autograd.Function):
    """Computes in float32: operations on mixed dtypes are slow, and the kernel sums a bfloat16 gradient of the weight
    in bfloat16, which makes it wrong by up to a sixth."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = (norm.square_() / x.shape[-1] + epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        width, wide_weight = grad.shape[-1], weight.float()
        rows = grad.reshape(-1, width).float()
        flat_x, flat_scale = x.reshape(rows.shape).float(), scale.view(-1, 1)
        mean = torch.zeros_like(flat_scale)
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            rows, flat_x, [width], mean, flat_scale, wide_weight, None, [True, ctx.needs_input_grad[1], False]
        )
        # LayerNorm's gradient subtracts this term for the mean; RMSNorm's does not have it.
        mean_term = torch.mv(rows, wide_weight)[:, None].mul_(flat_scale).div_(width)
        grad_x = grad_x.add_(mean_term).to(x.dtype).view(x.shape)
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), None


def _forward(self: _PlainNorm, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _is_plain(module: nn.Module) -> bool:
    """Whether the module is an RMSNorm as in Llama; related models share its attributes and formula."""
    return (
        type(module).__name__.endswith("RMSNorm")
        and set(vars(module)) >= {"variance_epsilon"}
        and [name for name, _ in module.named_parameters()] == ["weight"]
    )
