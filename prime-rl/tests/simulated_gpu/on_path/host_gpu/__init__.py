"""Gives PyTorch's CPU build GPUs that compute on the host: `../device.cpp`, and the parts of `torch.cuda` in Python.

As many as there are `/dev/nvidia*`, or as CUDA_VISIBLE_DEVICES names.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

LIBRARY_VARIABLE = "SIMULATED_GPU_LIBRARY"


def install_with_torch() -> None:
    """Wait for the first import of torch: most of a run's processes need none."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._is_asking = False

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch" or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self._is_asking = False
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_install(module: ModuleType) -> None:
            # Before torch asks for CUDA for the first time, and remembers that there is none.
            ctypes.CDLL(os.environ[LIBRARY_VARIABLE])
            load(module)
            for part in ("devices", "graphs", "flash", "collectives"):
                importlib.import_module(f"host_gpu.{part}").install()

        spec.loader.exec_module = load_and_install  # type: ignore[method-assign]
        return spec
