"""The interface of metric monitors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

Metrics = Mapping[str, float | int | str]


class Monitor(Protocol):
    """Receives a component's metrics once per step."""

    def log(self, metrics: Metrics, step: int) -> None: ...

    def close(self, exit_code: int = 0) -> None:
        """Flush, and record the run's exit code."""


class MultiMonitor:
    """Forwards every call to several monitors."""

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self.monitors = tuple(monitors)

    def log(self, metrics: Metrics, step: int) -> None:
        for monitor in self.monitors:
            monitor.log(metrics, step)

    def close(self, exit_code: int = 0) -> None:
        for monitor in self.monitors:
            monitor.close(exit_code)
