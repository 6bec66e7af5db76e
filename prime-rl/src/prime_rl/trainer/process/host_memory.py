"""Tunes glibc's allocator for the tensors of a CPU trainer. Does nothing with another C library, or with tcmalloc,
which needs no tuning.

By default glibc returns large blocks to the system at once, and the system zeroes each page before it hands it out
again. That takes half of the time of operations that create such tensors. Keeping the blocks instead mixes long-lived
and short-lived tensors on the heap, and holes make up a third of its memory. So long-lived tensors get their own
mappings, and tensors of the forward and backward passes get the heap to themselves.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_INT_MAX = 2**31 - 1
_MOST_MAPPINGS = 65536
"""glibc's default."""
_OWN_MAPPING_BYTES = 128 * 2**10
"""Blocks of at least this size get a mapping. It is glibc's default; unless set, glibc raises it over time."""

_STEPS_PER_RETURN = 100


def map_large_tensors() -> None:
    """From now on, give each large tensor its own mapping, which returns to the system when the tensor is freed."""
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)
        libc.mallopt(_M_MMAP_MAX, _MOST_MAPPINGS)


def keep_freed_memory() -> None:
    """From now on, allocate large tensors on the heap, and keep freed blocks for the next tensor."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _INT_MAX)


@contextmanager
def memory_of_a_step() -> Iterator[None]:
    """Within the block, allocate as in a training step, so that what is measured in a setup holds for the steps.

    Otherwise each result would be in new pages, for which the system takes as long as some operations.
    """
    keep_freed_memory()
    try:
        yield
    finally:
        map_large_tensors()


def return_freed_memory(step: int) -> None:
    """Every 100 steps, return the pages of freed blocks to the system.

    Tensors of ever new sizes leave ever new holes on the heap: 3,000 steps of a small model added 180 MiB. A call takes
    milliseconds, and as many to get the pages of the next step again.
    """
    if step % _STEPS_PER_RETURN == 0 and (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
