"""Matrix products in float32 through oneDNN, for a CPU with AVX-512.

PyTorch gives them to MKL, which uses half the width of an AMD core's registers: oneDNN's kernels, which PyTorch has for
other dtypes and for compiled graphs, take less than half the time there. Both compute and sum up in float32.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

_ROW_MULTIPLE = 32


def has_lean_products() -> bool:
    """Whether this machine and this PyTorch have the kernels."""
    return (
        torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def use_lean_linears(model: nn.Module) -> None:
    """Let the model's linear layers compute as here, where that is possible."""
    if not has_lean_products():
        return
    linears: list[nn.Module] = [module for module in model.modules() if type(module) is nn.Linear]
    for module in linears:
        module.forward = MethodType(_forward, module)


def product(a_NK: Tensor, b_MK: Tensor) -> Tensor:
    """`a @ b.T`, [N, M]; without a gradient."""
    if not (a_NK.dtype == torch.float32 and a_NK.device.type == "cpu" and has_lean_products()):
        return a_NK @ b_MK.t()
    if len(a_NK) > len(b_MK) and not (a_NK.is_contiguous() or b_MK.is_contiguous()):
        # Gradients of weights: the kernel likes the smaller side first.
        return _product(b_MK, a_NK).t().contiguous()
    return _product(a_NK, b_MK)


def row_count(rows: int) -> int:
    """`rows`, and a few more where these would be left out again: a kernel is made for each number of rows."""
    return -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grads, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = _product(grads, weight.t()).view(x.shape) if wants_x else None
        grad_weight = product(grads.t(), rows.t()) if wants_weight else None
        return grad_x, grad_weight, grads.sum(0) if wants_bias else None


def _product(a_NK: Tensor, b_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a_NK, b_MK, bias_M, "none", [], "")


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return nn.functional.linear(x, self.weight, self.bias)
    return _Linear.apply(x, self.weight, self.bias)
