"""Cross-entropy of a linear head without its logits: they exist for a few tokens at a time, and never twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prime_rl.trainer.optim.kept_gradients import KeptGradient, kept_gradient_of

_MAX_LOGITS = 2**25
"""Gradients of logits that may exist at a time, in the compute dtype: 64 MiB in bfloat16."""
_MAX_FLOAT_LOGITS = 2**22
"""Logits that may exist in float32 at a time: 16 MiB."""
_CACHED_FLOAT_LOGITS = 2**20
"""The same on a CPU: 4 MiB, which its caches hold. A GPU would wait for many small operations."""
_VOCABULARY_PART = 2048
"""Tokens of the vocabulary whose gradient is made at a time, where it is added to a kept one."""


def linear_cross_entropy_sum(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> Tensor:
    """Sum over N tokens of the cross-entropy of `hidden @ weight.T`, in float32.

    Gradients are made with the loss, so that no logit is computed again for the backward pass.
    """
    kept = kept_gradient_of(weight_VH)
    if not torch.is_grad_enabled():
        hidden_NH, weight_VH = hidden_NH.detach(), weight_VH.detach()
    return _LinearCrossEntropy.apply(hidden_NH, weight_VH, targets_N, kept)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, kept: KeptGradient | None) -> Tensor:
        rows = max(1, _MAX_LOGITS // len(weight))
        # One part's gradient by the logits is no larger than what follows from it, which then has a place already.
        is_added_later = kept is not None and len(targets) <= rows
        is_trained = any(ctx.needs_input_grad)
        grad_hidden = torch.empty_like(hidden) if is_trained else None
        grad_weight = slopes = None
        loss = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            slopes, part_loss = _loss_and_slopes(hidden[part], weight, targets[part], is_trained)
            loss += part_loss
            if slopes is None or grad_hidden is None:
                continue
            torch.mm(slopes, weight, out=grad_hidden[part])
            if is_added_later:
                break
            own = torch.mm(slopes.t(), hidden[part])
            # Several parts are summed in float32; one part needs no second copy.
            if len(targets) > rows:
                own = own.float() if grad_weight is None else grad_weight.add_(own)
            grad_weight = own
        ctx.save_for_backward(grad_hidden, grad_weight, *((slopes, hidden) if is_added_later else (None, None)))
        ctx.weight_dtype, ctx.kept = weight.dtype, kept
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, slopes, hidden = ctx.saved_tensors
        # In place, as the larger one has the size of the embedding.
        grad_hidden.mul_(grad)
        if ctx.kept is None:
            return grad_hidden, grad_weight.mul_(grad).to(ctx.weight_dtype), None, None
        place, scale = ctx.kept.place(), float(grad)
        if slopes is None:
            place.add_(grad_weight, alpha=scale)
        else:
            _add_products(place, slopes, hidden, scale)
        return grad_hidden, None, None, None


def _add_products(place_VH: Tensor, slopes_NV: Tensor, hidden_NH: Tensor, scale: float) -> None:
    for place, slopes in zip(place_VH.split(_VOCABULARY_PART), slopes_NV.split(_VOCABULARY_PART, dim=1), strict=True):
        place.add_(torch.mm(slopes.t(), hidden_NH), alpha=scale)


def _loss_and_slopes(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, is_trained: bool
) -> tuple[Tensor | None, Tensor]:
    """Gradient of the summed loss by the logits, in the compute dtype; and the loss."""
    on_cpu = hidden_NH.device.type == "cpu"
    most = min(_MAX_FLOAT_LOGITS, _CACHED_FLOAT_LOGITS) if on_cpu else _MAX_FLOAT_LOGITS
    rows = max(1, most // len(weight_VH))
    loss = hidden_NH.new_zeros((), dtype=torch.float32)
    logits = torch.mm(hidden_NH, weight_VH.t())
    for start in range(0, len(targets_N), rows):
        part = slice(start, start + rows)
        values, picked = logits[part].float(), targets_N[part, None]
        peak, own = values.amax(1, keepdim=True), values.gather(1, picked)
        # One exponential of each logit serves the loss and its gradient.
        total = values.sub_(peak).exp_().sum(1, keepdim=True)
        loss += (peak + total.log() - own).sum()
        if is_trained:
            slopes = values.div_(total)
            slopes.scatter_add_(1, picked, -torch.ones_like(total))
            logits[part] = slopes
    return logits if is_trained else None, loss
