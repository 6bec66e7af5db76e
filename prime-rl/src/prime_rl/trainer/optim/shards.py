"""AdamW and the gradient norm on this process's own shards.

An operation on a list of DTensors first derives how its results are sharded. For each tensor, that looks at all the
others, so the first call takes time in proportion to the square of the number of parameters. Here the same operations
get the shards themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import AdamW


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a sharded tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardAdamW(AdamW):
    """AdamW that updates shards. States are sharded like their parameters, as those of AdamW."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill the lists with parameters, gradients and states, which AdamW then updates in place."""
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return has_complex


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of all tensors as one vector, of every process's shards. Collective.

    All tensors are sharded along the same axes of one mesh, or none is.
    """
    norm = get_total_norm(list(map(local, tensors)), foreach=True)
    first = tensors[0]
    if isinstance(first, DTensor):
        squared = norm.square()
        for axis, placement in enumerate(first.placements):
            if placement.is_shard():
                dist.all_reduce(squared, group=first.device_mesh.get_group(axis))
        norm = squared.sqrt()
    return norm


def scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor in place."""
    with torch.no_grad():
        torch._foreach_mul_(list(map(local, tensors)), factor)
