"""Moves values that the host decides to the model's device without waiting for it.

`torch.tensor(values, device="cuda")` copies from pageable memory, for which the host waits until the GPU has done all
its work. A copy from pinned memory is queued behind that work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Values = Sequence[int] | Sequence[float] | Sequence[Sequence[int]]


def on_device(
    values: Values,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor of the values on the device."""
    return moved(torch.tensor(values, dtype=dtype), device)


def moved(host: Tensor, device: torch.device) -> Tensor:
    """A copy of a host tensor on the device; the tensor itself if that is a CPU.

    The allocator of pinned memory keeps the source until the copy is done.
    """
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def fill(target: Tensor, values: Values) -> None:
    """Overwrite a tensor by values of its shape."""
    host = torch.tensor(values, dtype=target.dtype)
    target.copy_(host if target.device.type == "cpu" else host.pin_memory(), non_blocking=True)
