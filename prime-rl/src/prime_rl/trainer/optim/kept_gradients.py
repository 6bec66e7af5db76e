"""Keeps the gradients of a single process on a CPU in the same memory for the whole run.

FSDP would sum the micro-batches of a step in its own tensors, copy them to a send buffer and from there to a receive
buffer, and allocate all of these again in the next step. That takes time and leaves holes in the heap.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from prime_rl.trainer.process.world import Process


class KeptGradient:
    """The gradient of a sharded parameter, in float32. The first addition after `zero_grad` makes it `grad`."""

    def __init__(self, sharded: nn.Parameter) -> None:
        self._sharded = sharded
        # Its pages are allocated by the first gradient.
        self._kept = torch.empty_like(sharded, requires_grad=False)
        self._place = self._kept.to_local() if isinstance(self._kept, DTensor) else self._kept

    def take(self, gathered: Tensor) -> None:
        """Add the `grad` that autograd left on the gathered parameter, and clear it so that FSDP does not reduce it."""
        if gathered.grad is None:
            # The whole gradient was added without autograd.
            return
        if self._sharded.grad is None:
            self._place.copy_(gathered.grad)
            self._sharded.grad = self._kept
        else:
            self._place.add_(gathered.grad)
        gathered.grad = None

    def place(self) -> Tensor:
        """The tensor to add a gradient to, in float32."""
        if self._sharded.grad is None:
            self._place.zero_()
            self._sharded.grad = self._kept
        return self._place


class _Keeping(Protocol):
    """The attribute that `keep_gradients` adds to a gathered parameter."""

    kept_gradient: KeptGradient


def keep_gradients(model: nn.Module, process: Process) -> None:
    """Make backward passes of the sharded `model` add to gradients that stay in place.

    The sharded parameters get the same `grad` as from FSDP, also after `zero_grad(set_to_none=True)`. Does nothing with
    several processes, on a GPU, or for master weights in another dtype than float32, whose sums need another dtype.

    Leaves the weights gathered: `enable_scoring`, which runs next, needs them gathered and then shards them.
    """
    if process.world_size > 1 or process.device.type != "cpu":
        return
    sharded = dict(model.named_parameters())
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.unshard()
    for name, gathered in model.named_parameters():
        if gathered.requires_grad and sharded[name].dtype == torch.float32:
            kept = KeptGradient(sharded[name])
            cast("_Keeping", gathered).kept_gradient = kept
            gathered.register_post_accumulate_grad_hook(kept.take)


def kept_gradient_of(gathered: Tensor) -> KeptGradient | None:
    """The kept gradient of a gathered parameter, to add to without autograd; None if it is frozen or not kept."""
    return getattr(gathered, "kept_gradient", None) if gathered.requires_grad else None
