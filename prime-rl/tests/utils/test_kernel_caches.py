from __future__ import annotations

import os
import subprocess
import sys

import pytest

from prime_rl.utils.imports import KERNELS_KEPT, bound_kernel_caches

HELD_BY_KERNELS = """
import ctypes
from prime_rl.utils.imports import bound_kernel_caches
bound_kernel_caches()
import torch

class Blocks(ctypes.Structure):
    _fields_ = [(f"field_{index}", ctypes.c_size_t) for index in range(10)]

def held_bytes():
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Blocks
    return libc.mallinfo2().field_7  # uordblks: what malloc has given out

def products(lengths):
    for length in lengths:
        torch.mm(torch.ones(length, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16))

products(range(2, 302))
before = held_bytes()
products(range(302, 602))
print(held_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the blocks of glibc's allocator")
def test_memory_stops_growing_with_new_lengths() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    answer = subprocess.run(
        [sys.executable, "-c", HELD_BY_KERNELS], env=environment, capture_output=True, text=True, check=True
    )
    # 300 more kernels hold 170 MB without the bound.
    assert int(answer.stdout) < 20e6


def test_a_limit_in_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1024")
    bound_kernel_caches()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "1024"
    assert os.environ["LRU_CACHE_CAPACITY"] == str(KERNELS_KEPT)
