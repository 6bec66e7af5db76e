"""Opens the sinks that a config turns on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from prime_rl.configs.shared import MonitorConfig, WandbConfig
from prime_rl.monitors.base import Metrics, Monitor
from prime_rl.monitors.sinks.attempts import Attempt
from prime_rl.monitors.sinks.described import SinkRun
from prime_rl.monitors.sinks.guard import LIMITS, Guarded, GuardedTables, Limits, close_all


class Sinks:
    """All sinks of a process, each in its own thread. They close at the same time."""

    def __init__(self, wandb: GuardedTables | None, others: list[Guarded[Any]], limits: Limits) -> None:
        self.wandb = wandb
        self._limits = limits
        self._all = [*([wandb] if wandb is not None else []), *others]

    def log(self, metrics: Metrics, step: int) -> None:
        for sink in self._all:
            sink.log(metrics, step)

    def close(self, exit_code: int = 0) -> None:
        close_all(self._all, exit_code, self._limits.close_s)


def open_sinks(
    wandb: WandbConfig | None,
    monitor: MonitorConfig,
    run: SinkRun,
    wandb_directory: Path,
    limits: Limits = LIMITS,
) -> Sinks:
    """Start W&B, if configured, and the sinks of `[monitor]`.

    Raises:
        RunError: the user has to change something before a sink can start.
    """
    tables = None if wandb is None else GuardedTables("W&B", partial(_wandb, wandb, run, wandb_directory), limits)
    return Sinks(tables, [Guarded(name, start, limits) for name, start in _starts(monitor, run)], limits)


def _wandb(config: WandbConfig, run: SinkRun, directory: Path) -> Monitor:
    # Imported late: wandb costs half a second.
    from prime_rl.monitors.sink_packages import WandbMonitor

    # The trainers share a name, as their files do.
    part = "trainer" if run.component == "sft" else run.component
    attempt = Attempt(run.paths.wandb_id(part), run.resumes)
    return WandbMonitor(config, directory, dict(run.config), attempt)


def _starts(config: MonitorConfig, run: SinkRun) -> Iterator[tuple[str, Callable[[], Monitor]]]:
    if config.tensorboard is not None:
        from prime_rl.monitors.sink_packages import TensorBoardMonitor

        yield "TensorBoard", partial(TensorBoardMonitor, config.tensorboard, run)
    if config.trackio is not None:
        from prime_rl.monitors.sink_packages import TrackioMonitor

        yield "Trackio", partial(TrackioMonitor, config.trackio, run)
    if config.swanlab is not None:
        from prime_rl.monitors.sink_packages import SwanLabMonitor

        yield "SwanLab", partial(SwanLabMonitor, config.swanlab, run)
    if config.mlflow is not None:
        from prime_rl.monitors.sink_packages import MlflowMonitor

        yield "MLflow", partial(MlflowMonitor, config.mlflow, run)
