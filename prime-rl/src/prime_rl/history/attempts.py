"""Reads the receipts of a run's attempts, and collects the facts of a machine that go there."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from prime_rl.run.paths import RunPaths
from prime_rl.utils.gpus import machine_gpus
from prime_rl.utils.limits import usable_cpus


@dataclass(frozen=True, slots=True)
class Attempt:
    """One launch of a run."""

    number: int
    started_s: float
    """Seconds since the epoch."""
    host: str
    step: int | None = None
    """The step that it continued from. None started a new run."""
    ended_s: float | None = None
    """None while it runs, or if the launcher was killed."""
    result: str | None = None
    """`complete`, `stopped`, `failed`, or `refused`: it would be refused again. None as long as there is no end."""
    message: str = ""
    """Why it stopped or failed."""
    command: str = ""
    slurm_job: str | None = None
    machine: Mapping[str, Any] | None = None
    """Result of `machine_facts`. None in receipts of older versions."""
    gpus: Mapping[str, Sequence[str]] | None = None
    """Ids of the GPUs of each component, which may share some. Empty on a CPU; None if the receipt does not say."""
    parts: Mapping[str, Any] | None = None
    """State that each part has restored."""
    lost: Sequence[str] = ()
    """Processes without which it continued, and why."""

    @classmethod
    def of_receipt(cls, table: Any) -> Attempt:
        """Raises KeyError, TypeError or ValueError if the table is not a receipt."""
        if not isinstance(table, Mapping):
            raise TypeError("a receipt is a JSON object")
        outcome = table.get("outcome")
        result = table.get("result")
        if result is None and outcome is not None:
            result = "complete" if outcome == "complete" else "failed"
        machine, parts, job = table.get("machine"), table.get("parts"), table.get("slurm_job_id")
        return cls(
            number=int(table["attempt"]),
            started_s=_seconds(table["started"]),
            host=str(table["host"]),
            step=None if table.get("step") is None else int(table["step"]),
            ended_s=None if table.get("ended") is None else _seconds(table["ended"]),
            result=None if result is None else str(result),
            message="" if outcome in (None, "complete") else str(outcome),
            command=str(table.get("command", "")),
            slurm_job=None if job is None else str(job),
            machine=machine if isinstance(machine, Mapping) else None,
            gpus=_gpus(table.get("gpus")),
            parts=parts if isinstance(parts, Mapping) else None,
            lost=[str(line) for line in lost] if isinstance(lost := table.get("lost"), list) else [],
        )


def read_attempts(paths: RunPaths) -> list[Attempt]:
    """The attempts of a run, in order. A receipt that cannot be read is left out."""
    found = []
    for file in paths.attempts.glob("*.json"):
        try:
            found.append(Attempt.of_receipt(json.loads(file.read_bytes())))
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
    return sorted(found, key=lambda attempt: attempt.number)


def _gpus(table: Any) -> Mapping[str, Sequence[str]] | None:
    if not isinstance(table, Mapping) or not all(isinstance(ids, list) for ids in table.values()):
        return None
    return {str(component): [str(each) for each in ids] for component, ids in table.items()}


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# Facts of a machine and its software.


PACKAGES = ("medarc-rl", "prime-rl", "torch", "transformers", "vllm", "verifiers")
_LOOK_LIMIT_S = 5.0


def machine_facts(directory: Path) -> dict[str, Any]:
    """Processor, memory, GPUs, versions of packages, and the git commit of a directory, ready for JSON."""
    return {
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "usable_cpus": usable_cpus(),
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
    """Output of a program; empty if it is missing, fails, or takes too long."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_LOOK_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""
