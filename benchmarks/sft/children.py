"""Runs a command and measures it with its child processes: start time, and peak memory summed over them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from process_tree import process_tree

LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Watched:
    """Measurements of a process tree."""

    started_at: float
    """In seconds since 1970."""
    seconds: float
    peak_gb: float
    """Sum over the processes of each one's highest resident memory, in 1e9 bytes."""


def run_watched(argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> Watched:
    """Run a command to its end, with its output in `log`.

    Raises:
        RuntimeError: it failed; the message contains the end of the log.
    """
    peaks_kb: dict[int, int] = {}
    started_at = time.time()
    with log.open("w") as output:
        child = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment)
        while child.poll() is None:
            peaks_kb |= {process: _peak_kb(process, peaks_kb.get(process, 0)) for process in process_tree(child.pid)}
            time.sleep(LOOK_EVERY_S)
    if child.returncode != 0:
        raise RuntimeError(f"{argv[0]} ended with {child.returncode}:\n{log.read_text()[-3000:]}")
    return Watched(started_at, time.time() - started_at, sum(peaks_kb.values()) * 1024 / 1e9)


def _peak_kb(process: int, known: int) -> int:
    """The kernel's high-water mark, so that polling misses no peak; `known` if the process has exited."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return known
    return max([known, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))])
