"""Gradients of several micro-batches, summed before FSDP takes them."""

from __future__ import annotations

from torch import nn

from prime_rl.trainer.world import World


def holds_whole_model(world: World) -> bool:
    """Whether FSDP's gathering and sharing are copies from memory to memory: a lone process on a CPU.

    They take a fifth of a step there. On a GPU they are cheap, and free memory that is not.
    """
    return world.world_size == 1 and world.device.type == "cpu"


def hold_gradients(model: nn.Module, world: World, *, until_next: bool) -> None:
    """Let a lone process on a CPU keep gathered weights and its gradients as they are `until_next` backward pass."""
    if holds_whole_model(world):
        model.set_requires_gradient_sync(not until_next)
        model.set_reshard_after_backward(not until_next)
