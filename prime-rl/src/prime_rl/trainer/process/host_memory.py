"""How glibc's allocator deals with the tensors of a CPU trainer. Other libraries are left as they are.

By default it gives large blocks back to the system at once, which hands them out again page by page, each one zeroed:
half of the time of operations that make such tensors. Without that, what lives long lies between what does not, and
holes make up a third of the memory. So tensors that are to stay have mappings of their own, and those of the passes
have the heap for themselves.
"""

from __future__ import annotations

import ctypes
import platform

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_INT_MAX = 2**31 - 1
_MOST_MAPPINGS = 65536
"""glibc's own default."""
_OWN_MAPPING_BYTES = 128 * 2**10
"""From this size on; glibc's own default, which it would raise with use unless it is set."""


def map_large_tensors() -> None:
    """Give each large tensor that is made from now on a mapping of its own, which goes back to the system with it."""
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)
        libc.mallopt(_M_MMAP_MAX, _MOST_MAPPINGS)


def keep_freed_memory() -> None:
    """Take large tensors from the heap from now on, and let it keep what is freed for the next tensor."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _INT_MAX)


def untouched_zeros_like(tensor: Tensor) -> Tensor:
    """Zeros that take memory and time only when they are first written to."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # PyTorch writes zeros; NumPy lets the system do so, page by page.
    zeros = torch.from_numpy(np.zeros(local.nbytes, np.uint8)).view(local.dtype).view(local.shape)
    if not isinstance(tensor, DTensor):
        return zeros
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(zeros, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
