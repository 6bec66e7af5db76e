"""Cross-entropy of a linear head without its logits: they exist for a few tokens at a time, and never twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MAX_LOGITS = 2**25
"""Gradients of logits that may exist at a time, in the compute dtype: 64 MiB in bfloat16."""
_MAX_FLOAT_LOGITS = 2**22
"""Logits that may exist in float32 at a time: 16 MiB, which caches hold."""


def linear_cross_entropy_sum(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> Tensor:
    """Sum over N tokens of the cross-entropy of `hidden @ weight.T`, in float32.

    Gradients are made with the loss, so that no logit is computed again for the backward pass.
    """
    if not torch.is_grad_enabled():
        hidden_NH, weight_VH = hidden_NH.detach(), weight_VH.detach()
    return _LinearCrossEntropy.apply(hidden_NH, weight_VH, targets_N)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        rows = max(1, _MAX_LOGITS // len(weight))
        is_trained = any(ctx.needs_input_grad)
        grad_hidden = torch.empty_like(hidden) if is_trained else None
        grad_weight = None
        loss = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            slopes, part_loss = _loss_and_slopes(hidden[part], weight, targets[part], is_trained)
            loss += part_loss
            if slopes is None:
                continue
            torch.mm(slopes, weight, out=grad_hidden[part])
            own = torch.mm(slopes.t(), hidden[part])
            # Several parts are summed in float32; one part needs no second copy.
            if len(targets) > rows:
                own = own.float() if grad_weight is None else grad_weight.add_(own)
            grad_weight = own
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # In place, as the larger one has the size of the embedding.
        return grad_hidden.mul_(grad), grad_weight.mul_(grad).to(ctx.weight_dtype), None


def _loss_and_slopes(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, is_trained: bool
) -> tuple[Tensor | None, Tensor]:
    """Gradient of the summed loss by the logits, in the compute dtype; and the loss."""
    rows = max(1, _MAX_FLOAT_LOGITS // len(weight_VH))
    loss = hidden_NH.new_zeros((), dtype=torch.float32)
    logits = torch.mm(hidden_NH, weight_VH.t())
    for start in range(0, len(targets_N), rows):
        part = slice(start, start + rows)
        values, picked = logits[part].float(), targets_N[part, None]
        normalizer = values.logsumexp(1, keepdim=True)
        loss += (normalizer - values.gather(1, picked)).sum()
        if is_trained:
            slopes = values.sub_(normalizer).exp_()
            slopes.scatter_add_(1, picked, -torch.ones_like(normalizer))
            logits[part] = slopes
    return logits if is_trained else None, loss
