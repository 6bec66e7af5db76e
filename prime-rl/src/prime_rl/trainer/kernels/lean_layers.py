"""RMSNorm and SwiGLU layers for CPUs, each as one autograd function with a cheaper backward pass.

Transformers implements RMSNorm as six operations on float32 copies. Their backward pass takes a third of the time of a
block's matrix products on two cores, and keeps two float32 tensors. Here the backward pass uses LayerNorm's kernel:
RMSNorm is LayerNorm with the mean fixed at 0, so only the gradient's mean term has to be added back.

Of a SwiGLU layer, autograd would save four tensors of the inner width. Two of them are recomputed from the other two
instead, which takes less than 2% of the layer's time. The two gradients of the input are accumulated in place.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import MethodType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from prime_rl.trainer.kernels.products import ONEDNN, Products


class _PlainNorm(Protocol):
    weight: Tensor
    variance_epsilon: float


def use_lean_norms(model: nn.Module) -> None:
    """Replace the forward of the model's standard RMSNorm modules."""
    for module in model.modules():
        if _is_plain_norm(module):
            module.forward = MethodType(_norm_forward, module)


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


def _norm_forward(self: _PlainNorm, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _is_plain_norm(module: nn.Module) -> bool:
    """Whether the module is an RMSNorm as in Llama; related models share its attributes and formula."""
    return (
        type(module).__name__.endswith("RMSNorm")
        and set(vars(module)) >= {"variance_epsilon"}
        and [name for name, _ in module.named_parameters()] == ["weight"]
    )


_FORMULA = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
"""The forward pass as written in Llama and related models."""
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class _PlainMLP(Protocol):
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear


def use_lean_mlps(model: nn.Module, products: Products = ONEDNN) -> None:
    """Replace the forward of the model's SwiGLU layers. Call after adapters are added: adapted layers are skipped."""
    for module in model.modules():
        if _is_plain_mlp(module):
            module.forward = partial(_mlp_forward, cast("_PlainMLP", module), products)


def swiglu_mlp(x: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, products: Products) -> Tensor:
    """Compute `(silu(x @ gate.T) * (x @ up.T)) @ down.T` for x [..., H]."""
    return _SwiGLU.apply(x, gate_IH, up_IH, down_HI, products)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, products: Products) -> Tensor:
        ctx.products, product = products, products.outputs
        x_NH = x.reshape(-1, x.shape[-1])
        gates, ups = product(x_NH, gate_IH), product(x_NH, up_IH)
        ctx.save_for_backward(x, gates, ups, gate_IH, up_IH, down_HI)
        return product(nn.functional.silu(gates).mul_(ups), down_HI).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, ups, gate_IH, up_IH, down_HI = ctx.saved_tensors
        wants_x, wants_gate, wants_up, wants_down, _ = ctx.needs_input_grad
        products: Products = ctx.products
        x_NH, grad_NH = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        active = nn.functional.silu(gates)
        inner = active * ups
        grad_down = products.weight_grads(grad_NH.t(), inner.t()) if wants_down else None
        grad_inner = products.input_grads(grad_NH, down_HI.t())
        grad_gates = torch.ops.aten.silu_backward(torch.mul(grad_inner, ups, out=inner), gates)
        grad_ups = grad_inner.mul_(active)
        grad_gate = products.weight_grads(grad_gates.t(), x_NH.t()) if wants_gate else None
        grad_up = products.weight_grads(grad_ups.t(), x_NH.t()) if wants_up else None
        grad_x = _sum_of_products(products, grad_gates, gate_IH, grad_ups, up_IH).view(x.shape) if wants_x else None
        return grad_x, grad_gate, grad_up, grad_down, None


def _sum_of_products(products: Products, a_NI: Tensor, one_IH: Tensor, b_NI: Tensor, other_IH: Tensor) -> Tensor:
    if a_NI.dtype == products.dtype:
        return products.input_grads(a_NI, one_IH.t()).add_(products.input_grads(b_NI, other_IH.t()))
    return torch.mm(a_NI, one_IH).addmm_(b_NI, other_IH)


def _mlp_forward(self: _PlainMLP, products: Products, x: Tensor) -> Tensor:
    return swiglu_mlp(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight, products)


def _is_plain_mlp(module: nn.Module) -> bool:
    """Whether the module computes exactly `_FORMULA`, with linear layers without biases or adapters."""
    linears = [getattr(module, name, None) for name in _PROJECTIONS]
    return (
        all(type(linear) is nn.Linear and linear.bias is None and not linear._forward_hooks for linear in linears)
        and isinstance(getattr(module, "act_fn", None), nn.SiLU | SiLUActivation)
        and _has_formula(type(module))
    )


def _has_formula(kind: type[nn.Module]) -> bool:
    lines = [line.strip() for line in inspect.getsource(kind.forward).splitlines() if line.strip()]
    return lines in (
        ["def forward(self, x):", f"return {_FORMULA}"],
        ["def forward(self, x):", f"down_proj = {_FORMULA}", "return down_proj"],
    )
