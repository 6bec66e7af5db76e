"""Gradients of a lone process on a CPU: each has one place in memory for the whole run.

FSDP would sum a step's micro-batches in tensors of its own, copy those into a buffer to send, that into one received,
and make all of them anew in the next step: that takes time, and leaves holes in the heap.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from prime_rl.trainer.process.world import World


class KeptGradient:
    """The gradient of a sharded parameter, in float32; `grad` of it from the first addition after `zero_grad` on."""

    def __init__(self, sharded: nn.Parameter) -> None:
        self._sharded = sharded
        # No page of it is touched before the first gradient.
        self._kept = torch.empty_like(sharded, requires_grad=False)
        self._place = self._kept.to_local() if isinstance(self._kept, DTensor) else self._kept

    def take(self, gathered: Tensor) -> None:
        """Add what autograd has left in `grad` of the gathered parameter, and leave nothing there for FSDP to share."""
        if gathered.grad is None:
            # All of it was added without autograd.
            return
        if self._sharded.grad is None:
            self._place.copy_(gathered.grad)
            self._sharded.grad = self._kept
        else:
            self._place.add_(gathered.grad)
        gathered.grad = None

    def place(self) -> Tensor:
        """Where to add to, in float32."""
        if self._sharded.grad is None:
            self._place.zero_()
            self._sharded.grad = self._kept
        return self._place


def keep_gradients(model: nn.Module, world: World) -> None:
    """Let backward passes of the sharded `model` add to gradients that stay where they are.

    They are those of the sharded parameters, as FSDP would leave them, also after `zero_grad(set_to_none=True)`. Only
    for a lone process on a CPU, and for float32 master weights: others' sums need another dtype than the gradients.

    Leaves the weights gathered: `enable_scoring`, which comes next, needs them so and then shards them.
    """
    if world.world_size > 1 or world.device.type != "cpu":
        return
    sharded = dict(model.named_parameters())
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.unshard()
    for name, gathered in model.named_parameters():
        if gathered.requires_grad and sharded[name].dtype == torch.float32:
            gathered.kept_gradient = KeptGradient(sharded[name])
            gathered.register_post_accumulate_grad_hook(gathered.kept_gradient.take)


def kept_gradient_of(gathered: Tensor) -> KeptGradient | None:
    """Where the gradient of this parameter may be added without autograd, if it is to be trained and kept at all."""
    return getattr(gathered, "kept_gradient", None) if gathered.requires_grad else None
