"""Cross-entropy of a linear head without its logits: they exist for a few tokens at a time, and never twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prime_rl.trainer.optim.kept_gradients import KeptGradient, kept_gradient_of


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a head's work is done at a time."""

    logits: int = 2**25
    """Logits, or their gradients, that may exist at a time, in the compute dtype: 64 MiB in bfloat16."""
    float_logits: int = 2**22
    """Those of a linear head that may exist in float32: 16 MiB."""
    cached_float_logits: int = 2**20
    """The same on a CPU: 4 MiB, which its caches hold. A GPU would wait for many small operations."""
    vocabulary_part: int = 2048
    """Tokens of the vocabulary whose gradient is made at a time, where it is added to a kept one."""

    def float_rows(self, width: int, on_cpu: bool) -> int:
        """Rows of `width` logits to hold in float32."""
        return max(1, (min(self.float_logits, self.cached_float_logits) if on_cpu else self.float_logits) // width)


LIMITS = Limits()


def linear_cross_entropy_sum(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, limits: Limits = LIMITS
) -> Tensor:
    """Sum over N tokens of the cross-entropy of `hidden @ weight.T`, in float32.

    Gradients are made with the loss, so that no logit is computed again for the backward pass.
    """
    kept = kept_gradient_of(weight_VH)
    if not torch.is_grad_enabled():
        hidden_NH, weight_VH = hidden_NH.detach(), weight_VH.detach()
    return _LinearCrossEntropy.apply(hidden_NH, weight_VH, targets_N, kept, limits)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, kept: KeptGradient | None, limits: Limits
    ) -> Tensor:
        rows = max(1, limits.logits // len(weight))
        # One part's gradient by the logits is no larger than what follows from it, which then has a place already.
        is_added_later = kept is not None and len(targets) <= rows
        is_trained = any(ctx.needs_input_grad)
        grad_hidden = torch.empty_like(hidden) if is_trained else None
        grad_weight = slopes = None
        loss = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            slopes, part_loss = _loss_and_slopes(hidden[part], weight, targets[part], is_trained, limits)
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
        ctx.weight_dtype, ctx.kept, ctx.part = weight.dtype, kept, limits.vocabulary_part
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, slopes, hidden = ctx.saved_tensors
        # In place, as the larger one has the size of the embedding.
        grad_hidden.mul_(grad)
        if ctx.kept is None:
            return grad_hidden, grad_weight.mul_(grad).to(ctx.weight_dtype), None, None, None
        place, scale = ctx.kept.place(), float(grad)
        if slopes is None:
            place.add_(grad_weight, alpha=scale)
        else:
            _add_products(place, slopes, hidden, scale, ctx.part)
        return grad_hidden, None, None, None, None


def _add_products(place_VH: Tensor, slopes_NV: Tensor, hidden_NH: Tensor, scale: float, part: int) -> None:
    for place, slopes in zip(place_VH.split(part), slopes_NV.split(part, dim=1), strict=True):
        place.add_(torch.mm(slopes.t(), hidden_NH), alpha=scale)


def _loss_and_slopes(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, is_trained: bool, limits: Limits
) -> tuple[Tensor | None, Tensor]:
    """Gradient of the summed loss by the logits, in the compute dtype; and the loss."""
    rows = limits.float_rows(len(weight_VH), on_cpu=hidden_NH.device.type == "cpu")
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
