"""A run as a sink sees it: its name, its settings, and which attempt it continues."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.monitors.base import Metrics
from prime_rl.monitors.sinks.attempts import Attempt
from prime_rl.run.paths import RunPaths

_PARTS_OF_RL = ("trainer", "orchestrator")


@dataclass(frozen=True, slots=True)
class SinkRun:
    """One process that logs metrics, and the run's directory."""

    component: str
    """`sft`, `trainer`, `orchestrator` or `eval`."""
    paths: RunPaths
    config: Mapping[str, Any]
    """The process's settings, as plain values."""
    resumes: bool = False
    """Whether an earlier attempt has logged to the same run."""

    def named(self, name: str | None) -> str:
        """The name of the run. Each part of an RL run has its own."""
        base = name or self.paths.root.absolute().name
        return f"{base}-{self.component}" if self.component in _PARTS_OF_RL else base

    def attempt(self, sink: str) -> Attempt:
        return Attempt(self.paths.sink_id(sink, self.component), self.resumes, sink, advice="")

    def directory(self, sink: str, given: Path | None) -> Path:
        """Where a sink writes; made if it is missing."""
        directory = (given or self.paths.sink(sink)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        return directory


def numbers(metrics: Metrics) -> dict[str, float]:
    """The metrics that are numbers. A sink draws curves; texts stay in `metrics.jsonl`."""
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, str)}


def finite(metrics: Metrics) -> dict[str, float]:
    """The metrics that a sink without NaN and infinities can store."""
    return {name: value for name, value in numbers(metrics).items() if math.isfinite(value)}
