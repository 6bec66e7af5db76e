"""Gathers sharded weights once for several micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from prime_rl.trainer.model.blocks import decoder_blocks
from prime_rl.trainer.process.world import Process

Row = TypeVar("Row")


def accumulated(model: PreTrainedModel, rows: Sequence[Row], process: Process) -> Iterator[Row]:
    """The micro-batches of a step. Run forward and backward on each before taking the next.

    A single process on a CPU gathers the weights once per step, since gathering copies them within host memory. They
    are freed after the last backward pass. On a GPU the copies are cheap and the memory is not, so nothing is kept.
    """
    if process.world_size > 1 or process.device.type != "cpu":
        yield from rows
        return
    _keep_weights_after_forward(model, keep=True)
    # Before the first activation, so that freeing them leaves no holes between activations.
    assert isinstance(model, FSDPModule)
    for unit in (model, *_blocks(model)):
        unit.unshard()
    for index, row in enumerate(rows):
        model.set_reshard_after_backward(index + 1 == len(rows))
        yield row
    _keep_weights_after_forward(model, keep=False)


def _keep_weights_after_forward(model: PreTrainedModel, keep: bool) -> None:
    for block in _blocks(model):
        block.set_reshard_after_forward(not keep, recurse=False)


def _blocks(model: PreTrainedModel) -> list[FSDPModule]:
    return [block for block in decoder_blocks(model) if isinstance(block, FSDPModule)]
