"""Matrix products of linear layers on a CPU: PyTorch's or oneDNN's, and those of bfloat16 matrices in float32.

For float32 products, PyTorch uses MKL, which uses only half the register width of some AMD cores. oneDNN's kernels,
which PyTorch includes for other dtypes and compiled graphs, take less than half the time there. On other cores the two
differ only in some of a layer's three products. Both compute and accumulate in float32.

Some processors multiply bfloat16 at half the rate of float32: those of Intel with AVX-512 BF16 whose AMX is absent or
hidden by a virtual machine. Others have no instruction for it at all. There it is faster to convert the factors, which
takes far less time than the product. The results are rounded to bfloat16 once, as those of bfloat16 kernels are, which
accumulate in float32 too.

`product_choice` measures which way is fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as _linear

Product = Callable[[Tensor, Tensor], Tensor]
"""Computes `a @ b.T`, without a gradient."""

MOST_ELEMENTS = 1 << 22
"""Elements of a factor that are in float32 at a time, 16 MiB, so that the head of a large vocabulary takes no more."""


@dataclass(frozen=True, slots=True)
class _InFloat32:
    """A value, so that two of the same product are equal."""

    product: Product
    most_elements: int

    def __call__(self, a_NK: Tensor, b_MK: Tensor) -> Tensor:
        if a_NK.dtype != torch.bfloat16:
            return self.product(a_NK, b_MK)
        rows, columns, inner = len(a_NK), len(b_MK), a_NK.shape[1]
        if inner * max(rows, columns) <= self.most_elements:
            return self.product(a_NK.float(), b_MK.float()).to(a_NK.dtype)
        if inner >= max(rows, columns):
            return self._summed(a_NK, b_MK)
        out = a_NK.new_empty(rows, columns)
        step = max(1, self.most_elements // inner)
        if rows >= columns:
            wide = b_MK.float()
            for part, own in zip(a_NK.split(step), out.split(step), strict=True):
                own.copy_(self.product(part.float(), wide))
        else:
            wide = a_NK.float()
            for part, own in zip(b_MK.split(step), out.split(step, dim=1), strict=True):
                own.copy_(self.product(wide, part.float()))
        return out

    def _summed(self, a_NK: Tensor, b_MK: Tensor) -> Tensor:
        """The product as a sum over parts of a long inner dimension."""
        step = max(1, self.most_elements // max(len(a_NK), len(b_MK)))
        total = torch.zeros(len(a_NK), len(b_MK))
        for a, b in zip(a_NK.split(step, dim=1), b_MK.split(step, dim=1), strict=True):
            total += self.product(a.float(), b.float())
        return total.to(a_NK.dtype)


def in_float32(product: Product, most_elements: int = MOST_ELEMENTS) -> Product:
    """A product that converts bfloat16 factors to float32, and its result back. Other dtypes go to `product`.

    It converts at most `most_elements` of a factor at a time.
    """
    return _InFloat32(product, most_elements)


def has_onednn_products() -> bool:
    """Whether the PyTorch build has the oneDNN kernels."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def plain_product(a_NK: Tensor, b_MK: Tensor) -> Tensor:
    """Compute `a @ b.T`, [N, M], as PyTorch does."""
    return a_NK @ b_MK.t()


def onednn_product(a_NK: Tensor, b_MK: Tensor) -> Tensor:
    """Compute `a @ b.T`, [N, M], without a gradient; in float32 on a CPU through oneDNN, if PyTorch has it.

    A process that scores no token of a divided row has no rows, which oneDNN's kernel refuses.
    """
    is_float32 = a_NK.dtype == torch.float32 and a_NK.device.type == "cpu"
    if not (is_float32 and a_NK.numel() and has_onednn_products()):
        return plain_product(a_NK, b_MK)
    if len(a_NK) > len(b_MK) and not (a_NK.is_contiguous() or b_MK.is_contiguous()):
        # Weight gradients: the kernel is faster with the smaller operand first.
        return _product(b_MK, a_NK).t().contiguous()
    return _product(a_NK, b_MK)


@dataclass(frozen=True, slots=True)
class Products:
    """Functions that compute the three products of a linear layer."""

    outputs: Product = onednn_product
    input_grads: Product = onednn_product
    weight_grads: Product = onednn_product
    dtype: torch.dtype = torch.float32
    """Dtype of the matrices that they are for. Products of other dtypes are left to PyTorch."""

    def for_bfloat16(self) -> Products:
        """The same products for bfloat16 matrices, computed in float32."""
        return Products(
            in_float32(self.outputs), in_float32(self.input_grads), in_float32(self.weight_grads), torch.bfloat16
        )


ONEDNN = Products()
PLAIN = Products(plain_product, plain_product, plain_product)


def use_lean_linears(model: nn.Module, products: Products = ONEDNN) -> None:
    """Replace the forward of the model's linear layers, unless `products` are PyTorch's own."""
    if products == PLAIN or (products.dtype == torch.float32 and not has_onednn_products()):
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            linear: nn.Module = module
            linear.forward = partial(_forward, module, products)


def head_product(head: nn.Module) -> Product:
    """The product function for a head whose logits are computed in parts, without its forward.

    In float32 that is PyTorch, whatever computes the other layers: oneDNN copies large weight gradients.
    """
    forward = vars(head).get("forward")
    if isinstance(forward, partial) and forward.func is _forward and forward.args[1].dtype == torch.bfloat16:
        return in_float32(plain_product)
    return plain_product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: Products) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products = products
        if products.outputs is onednn_product:
            out = _product(x, weight, bias)
        elif products.outputs is plain_product:
            out = _linear(x, weight, bias)
        else:
            out = products.outputs(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)
            out = out if bias is None else out.add_(bias)
        # Not as a view, which a model's code could not change in place, as Gemma 3n's does.
        return cast("Tensor", torch.ops.aten._unsafe_view(out, list(out.shape)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        grads, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = ctx.products.input_grads(grads, weight.t()).view(x.shape) if wants_x else None
        grad_weight = ctx.products.weight_grads(grads.t(), rows.t()) if wants_weight else None
        return grad_x, grad_weight, grads.sum(0) if wants_bias else None, None


def _product(a_NK: Tensor, b_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a_NK, b_MK, bias_M, "none", [], "")


def _forward(self: nn.Linear, products: Products, x: Tensor) -> Tensor:
    if x.dtype != products.dtype or x.device.type != "cpu":
        return _linear(x, self.weight, self.bias)
    return _Linear.apply(x, self.weight, self.bias, products)
