"""What a receipt says about the machine and the software of an attempt."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from prime_rl.utils.gpus import machine_gpus

PACKAGES = ("medarc-rl", "prime-rl", "torch", "transformers", "vllm", "verifiers")
_LOOK_LIMIT_S = 5.0


def machine_facts(directory: Path) -> dict[str, Any]:
    """Processor, memory, GPUs, versions of packages, and the git commit of a directory, ready for JSON."""
    return {
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpu_names() if machine_gpus() else [],
        "python": platform.python_version(),
        "packages": dict(_versions(PACKAGES)),
        "git": git_state(directory),
    }


def gpu_names() -> list[str]:
    """Names of the machine's GPUs, ignoring any mask. Empty without nvidia-smi."""
    return [line.strip() for line in _answer("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()]


def git_state(directory: Path) -> dict[str, Any] | None:
    """The commit of a directory's repository, and whether tracked files were changed. None outside a repository."""
    git = ("git", "-C", str(directory))
    commit = _answer(*git, "rev-parse", "--short=12", "HEAD").strip()
    if not commit:
        return None
    return {"commit": commit, "is_changed": bool(_answer(*git, "status", "--porcelain", "--untracked-files=no"))}


def _versions(packages: Sequence[str]) -> Mapping[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _answer(*command: str) -> str:
    """What a program prints; nothing if it is missing, fails, or takes too long."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_LOOK_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""
