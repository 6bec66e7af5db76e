"""Moves values that the host decides to the model's device without waiting for it, as `to_device` does.

`torch.tensor(values, device="cuda")` waits until the GPU has done all its work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prime_rl.transport.to_device import to_device

Values = Sequence[int] | Sequence[float] | Sequence[Sequence[int]]


def on_device(
    values: Values,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor of the values on the device."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def fill(target: Tensor, values: Values) -> None:
    """Overwrite a tensor by values of its shape."""
    host = torch.tensor(values, dtype=target.dtype)
    target.copy_(host if target.device.type == "cpu" else host.pin_memory(), non_blocking=True)
