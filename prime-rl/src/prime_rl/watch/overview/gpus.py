"""Asks nvidia-smi for the GPUs of a run that this machine runs."""

from __future__ import annotations

import shutil
import socket
import subprocess
from dataclasses import dataclass

from prime_rl.run.lock import Holder

_LIMIT_S = 3.0
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Memory and load of one GPU."""

    index: str
    used_bytes: int
    total_bytes: int
    busy_percent: int | None


def gpu_use(holder: Holder | None) -> tuple[GpuUse, ...]:
    """The GPUs of this machine, if the holder of a run's lock is on it. Empty without nvidia-smi, or if it fails."""
    if holder is None or holder.host != socket.gethostname() or shutil.which("nvidia-smi") is None:
        return ()
    fields = "index,memory.used,memory.total,utilization.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return uses_of(answer.stdout) if answer.returncode == 0 else ()


def uses_of(table: str) -> tuple[GpuUse, ...]:
    """Read the table that nvidia-smi prints. A line with a figure that it does not know is left out."""
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[1].isdigit() and cells[2].isdigit():
            busy = int(cells[3]) if cells[3].isdigit() else None
            found.append(GpuUse(cells[0], int(cells[1]) * _MIB, int(cells[2]) * _MIB, busy))
    return tuple(found)
