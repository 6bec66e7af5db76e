"""Metrics for programs: one JSON object a line."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

from prime_rl.utils.monitor.base import Metrics


class JsonlMonitor:
    """Appends `{"time", "source", "step", <metric>: <value>, …}` lines to a file that several processes share.

    Each line is one `write` to a descriptor opened for appending, so lines of different processes do not mix.
    NaN and infinities, which JSON lacks, become null.
    """

    def __init__(self, path: Path, source: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.source = source
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def log(self, metrics: Metrics, step: int) -> None:
        record = {"time": time.time(), "source": self.source, "step": step}
        for name, value in metrics.items():
            record[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        os.write(self._descriptor, (json.dumps(record) + "\n").encode())

    def close(self, exit_code: int = 0) -> None:
        os.close(self._descriptor)
