"""AdamW and the gradient norm on this process's own shards.

The first time that PyTorch runs an operation on a list of DTensors, it works out how each result is sharded, and goes
through the whole list for each. That takes time in proportion to the square of the number of parameters. So the
operations here get plain tensors: this process's shards.
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

    Raises:
        ValueError: the tensors are not sharded alike.
    """
    layouts = {(each.device_mesh, each.placements) if isinstance(each, DTensor) else None for each in tensors}
    if len(layouts) != 1:
        raise ValueError(f"the norm of tensors that are sharded in {len(layouts)} ways")
    norm = get_total_norm(list(map(local, tensors)), foreach=True)
    if (layout := layouts.pop()) is None:
        return norm
    mesh, placements = layout
    squared = norm.square()
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            dist.all_reduce(squared, group=mesh.get_group(axis))
    return squared.sqrt()


def scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor in place."""
    with torch.no_grad():
        torch._foreach_mul_(list(map(local, tensors)), factor)
