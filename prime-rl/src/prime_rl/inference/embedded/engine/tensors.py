"""Rounds sizes up so that few different ones occur, and moves values to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prime_rl.transport.weights import to_device

# Sizes that tensors are rounded up to, so that few different ones occur.


def rounded_up(size: int, least_step: int, steps_per_doubling: int) -> int:
    """A multiple of `least_step`, or of a larger power of two that divides each doubling into that many steps.

    Both must be powers of two. Adds less than `least_step` or at most `size / steps_per_doubling`.
    """
    step = max(least_step, (1 << (size - 1).bit_length()) // (2 * steps_per_doubling))
    return -(-size // step) * step


# Moves values that the host decides to the model's device without waiting for it, as `to_device` does.
#
# `torch.tensor(values, device="cuda")` waits until the GPU has done all its work.


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
