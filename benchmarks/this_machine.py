"""Describes the machine and the versions that a figure was measured with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
PACKAGES = ("torch", "transformers")


def this_machine() -> dict[str, object]:
    """CPU, cores, instruction sets that decide speed, and memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = facts.get("flags", facts.get("Features", "")).split()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": facts.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "features": [name for name in FEATURES if name in flags],
        "memory_gib": round(memory_bytes / 2**30),
    }


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
