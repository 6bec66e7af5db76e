"""What every monitor can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

Metrics = Mapping[str, float | int | str]


class MonitorError(Exception):
    """A monitor that was asked for cannot start; the message says why, and what to do."""


class Monitor(Protocol):
    """Takes a component's metrics, once a step."""

    def log(self, metrics: Metrics, step: int) -> None: ...

    def close(self, exit_code: int = 0) -> None:
        """Flush, and say how the run ended."""


class MultiMonitor:
    """Hands each call to several monitors."""

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self.monitors = tuple(monitors)

    def log(self, metrics: Metrics, step: int) -> None:
        for monitor in self.monitors:
            monitor.log(metrics, step)

    def close(self, exit_code: int = 0) -> None:
        for monitor in self.monitors:
            monitor.close(exit_code)
