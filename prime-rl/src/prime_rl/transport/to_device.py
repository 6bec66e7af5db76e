"""Moves what the host has computed to the model's device without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; itself if it is there already.

    A copy from ordinary host memory waits until the GPU has done all its work; one from pinned memory is queued behind
    that work. The allocator of pinned memory keeps the source until the copy is done.
    """
    if device.type == "cpu" or host.device.type != "cpu":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
