"""Several micro-batches in a step, over weights that are gathered once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch import nn

from prime_rl.trainer.model.blocks import decoder_blocks
from prime_rl.trainer.process.world import World

Row = TypeVar("Row")


def accumulated(model: nn.Module, rows: Sequence[Row], world: World) -> Iterator[Row]:
    """The micro-batches of a step, each of which is to go forward and backward before the next one.

    A lone process on a CPU gathers weights once in the step: there that is a copy from memory to memory. Gathered
    weights are free again behind the last backward pass. On a GPU the copies are cheap, and what they free is not.
    """
    if world.world_size > 1 or world.device.type != "cpu":
        yield from rows
        return
    _keep_weights_after_forward(model, keep=True)
    # Before the first activation, so that they leave no holes between activations.
    for unit in (model, *decoder_blocks(model)):
        unit.unshard()
    for index, row in enumerate(rows):
        model.set_reshard_after_backward(index + 1 == len(rows))
        yield row
    _keep_weights_after_forward(model, keep=False)


def _keep_weights_after_forward(model: nn.Module, keep: bool) -> None:
    for block in decoder_blocks(model):
        block.set_reshard_after_forward(not keep, recurse=False)
