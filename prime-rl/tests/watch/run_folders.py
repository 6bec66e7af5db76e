"""Directories of runs, as the launcher and its processes write them."""

import json
import os
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prime_rl.run.lock import LOCK_NAME
from prime_rl.run.paths import RunPaths

START_S = 1_795_359_679.0
"""When the runs start, in seconds since the epoch."""
STEP_S = 2.0


class RunFolder:
    """A run that a test writes."""

    def __init__(self, root: Path, kind: str = "rl", max_steps: int | None = 10) -> None:
        self.paths = RunPaths(root)
        self.paths.configs.mkdir(parents=True)
        limit = "" if max_steps is None else f"max_steps = {max_steps}\n"
        self.paths.config(kind).write_text(limit)
        self.paths.logs.mkdir()

    def attempt(self, result: str | None = None, outcome: str = "complete", after_s: float = 100.0) -> None:
        receipt = {"attempt": 1, "started": _iso(START_S), "host": "vm", "step": None, "parts": {}}
        if result is not None:
            receipt |= {"ended": _iso(START_S + after_s), "result": result, "outcome": outcome}
        self.paths.attempts.mkdir(exist_ok=True)
        self.paths.receipt(1).write_text(json.dumps(receipt))

    def lock(self, host: str = "", pid: int = 0) -> None:
        """A launcher that runs: this process, or one on another machine."""
        holder = {"host": host or socket.gethostname(), "pid": pid or os.getpid(), "since": "now", "slurm_job": None}
        (self.paths.root / LOCK_NAME).write_text(json.dumps(holder))

    def metrics(self, source: str, step: int, **values: Any) -> None:
        record = {"time": START_S + STEP_S * (step + 1), "source": source, "step": step, **values}
        with self.paths.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def rl_step(self, step: int, reward: float, **parts: float) -> None:
        of_reward = {f"reward_parts/{name}": value for name, value in parts.items()}
        self.metrics("orchestrator", step, **{"reward/mean": reward, "batch/inflight_rollouts": 8, **of_reward})
        self.metrics("trainer", step, **{"loss/mean": 0.1 - step / 100, "perf/throughput": 5000 + step})

    def beat(self, process: str, doing: str, waits_for: str | None = None, at_s: float = START_S) -> None:
        file = self.paths.heartbeat(process)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps([3, at_s, doing, waits_for, True, [1]]) + "\n")

    def log(self, name: str, lines: Sequence[str]) -> None:
        self.paths.log(name).write_text("".join(f"{line}\n" for line in lines))


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
