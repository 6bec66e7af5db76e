"""Memory allocators of the processes that compute: PyTorch's on a GPU, and tcmalloc on a CPU, if this machine has it.

glibc's allocator searches long lists of freed blocks, because PyTorch asks for aligned blocks of many sizes.
The RL benchmarks compare the two. tcmalloc is part of Google's gperftools, which systems package.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PRELOAD_VARIABLE = "LD_PRELOAD"
CUDA_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"

_LIBRARIES = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
_REPORT_VARIABLE = "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD"
_NEVER_REPORT = str(2**63 - 1)
"""Bytes. Older versions write a line to stderr for each block of 1 GiB or more."""


def installed_tcmalloc(directories: Iterable[Path] | None = None) -> str | None:
    """The path of tcmalloc in `directories`, by default those of the Python environment and of the system.

    None if it is not installed.
    """
    places = library_directories() if directories is None else directories
    libraries = (directory / name for directory in places for name in _LIBRARIES)
    return next((str(library) for library in libraries if library.is_file() and _can_be_preloaded(library)), None)


def cpu_allocator_env(tcmalloc: str | None, env: Mapping[str, str]) -> dict[str, str]:
    """Let a process allocate with the library `tcmalloc`, unless `env` sets LD_PRELOAD, also if it is empty."""
    if tcmalloc is None or PRELOAD_VARIABLE in env:
        return {}
    quiet = {} if _REPORT_VARIABLE in env else {_REPORT_VARIABLE: _NEVER_REPORT}
    return {PRELOAD_VARIABLE: tcmalloc, **quiet}


def cuda_allocator_env(env: Mapping[str, str]) -> dict[str, str]:
    """Let the segments of a trainer's GPU memory grow, unless `env` configures the allocator.

    Rows of varying lengths fragment fixed segments.
    """
    given = any(name in env for name in ("PYTORCH_ALLOC_CONF", CUDA_VARIABLE))
    return {} if given else {CUDA_VARIABLE: "expandable_segments:True"}


def _can_be_preloaded(library: Path) -> bool:
    """LD_PRELOAD separates paths by colons and spaces, and has no way to escape one."""
    return not re.search(r"[:\s]", str(library))


def library_directories() -> Iterator[Path]:
    """Those with libraries for this Python's architecture: /usr/lib may hold libraries of another one."""
    yield from (Path(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix) if prefix != "/usr")
    yield Path("/usr/local/lib")
    if multiarch := sysconfig.get_config_var("MULTIARCH"):
        yield Path("/usr/lib", multiarch)
    yield Path("/usr/lib64")
