"""Token embedding for CPUs whose backward pass updates only the rows of the batch's tokens."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prime_rl.trainer.optim.kept_gradients import KeptGradient, kept_gradient_of


def use_lean_embedding(model: PreTrainedModel) -> None:
    """Replace the forward of the model's input embedding by one that adds to a kept gradient, if there is one."""
    module = model.get_input_embeddings()
    if _is_plain(module):
        module.forward = MethodType(_forward, module)


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, kept: KeptGradient) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.kept = padding, kept
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, grad = ctx.saved_tensors[0].flatten(), grad.reshape(-1, grad.shape[-1]).float()
        if ctx.padding is not None:
            grad = grad * (ids != ctx.padding)[:, None]
        ctx.kept.place().index_add_(0, ids, grad)
        return None, None, None, None


def _forward(self: nn.Embedding, ids: Tensor) -> Tensor:
    kept = kept_gradient_of(self.weight)
    if kept is None or not torch.is_grad_enabled():
        return nn.functional.embedding(ids, self.weight, self.padding_idx)
    return _Embedding.apply(self.weight, ids, self.padding_idx, kept)
