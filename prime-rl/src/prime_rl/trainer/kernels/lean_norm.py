"""RMSNorm with one kernel for the backward pass, for a CPU.

Transformers writes it in six operations on float32 copies, whose backward pass takes as long as a third of a block's
matrix products on two cores, and keeps two float32 tensors. LayerNorm's kernel does the same at once: RMSNorm is
LayerNorm about a mean of 0, whose gradient has one more term.
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
    """Let the model's plain RMSNorm modules compute as here."""
    for module in model.modules():
        if _is_plain(module):
            module.forward = MethodType(_forward, module)


def rms_norm(x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + epsilon)` over the last dimension, in float32 inside."""
    return _RMSNorm.apply(x, weight_H, epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = (norm.square_() / x.shape[-1] + epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return weight * (x * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        rows, width = grad.reshape(-1, grad.shape[-1]), grad.shape[-1]
        flat_x, flat_scale = x.reshape(rows.shape), scale.view(-1, 1)
        about = torch.zeros_like(flat_scale)
        # A float32 weight makes the kernel take float32 statistics.
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            rows, flat_x, [width], about, flat_scale, weight.float(), None, [True, ctx.needs_input_grad[1], False]
        )
        # What LayerNorm's gradient subtracts for the mean.
        surplus = torch.mv(rows, weight)[:, None].float() / width * flat_scale
        grad_x = grad_x.add_(surplus).view(x.shape)
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), None


def _forward(self: _PlainNorm, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _is_plain(module: nn.Module) -> bool:
    """Whether this is the RMSNorm of Llama and its many relatives, which share its attributes and its formula."""
    return (
        type(module).__name__.endswith("RMSNorm")
        and set(vars(module)) >= {"variance_epsilon"}
        and [name for name, _ in module.named_parameters()] == ["weight"]
    )
