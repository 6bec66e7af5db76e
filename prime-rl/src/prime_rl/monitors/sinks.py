"""Opens the sinks of metrics that a config turns on, each in its own thread: one that hangs does not stop a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any, Generic, TypeVar

from prime_rl.configs.shared import MonitorConfig, WandbConfig
from prime_rl.monitors.base import Metrics, Monitor
from prime_rl.monitors.sink_packages import Attempt, SinkRun
from prime_rl.utils.errors import RunError, first_line
from prime_rl.utils.logger import count_of, get_logger

SinkT = TypeVar("SinkT", bound=Monitor)


@dataclass(frozen=True, slots=True)
class Limits:
    """Time that a run waits for a sink, and metrics that it keeps for a slow one."""

    start_s: float = 90
    close_s: float = 30
    waiting: int = 1000
    """Records that wait to be logged. More are dropped and counted."""


LIMITS = Limits()


class Guarded(Generic[SinkT]):
    """Starts a sink, and logs to it, in a separate thread.

    The first failure is a warning; the run continues, and later records are tried again. A sink that does not end in
    time is left behind.
    """

    def __init__(self, name: str, start: Callable[[], SinkT], limits: Limits = LIMITS) -> None:
        """Start the sink, and wait for it at most `limits.start_s`.

        Raises:
            RunError: the user has to change something before the sink can start.
        """
        self.name = name
        self._limits = limits
        self._queue: Queue[Callable[[SinkT], object] | None] = Queue()
        self._is_up = threading.Event()
        self._refusal: RunError | None = None
        self._has_warned = False
        self._lost = 0
        self._exit_code = 0
        self._thread = threading.Thread(target=self._serve, args=(start,), name=name, daemon=True)
        self._thread.start()
        # The main thread waits, because two threads that import packages at the same time may wait for each other.
        if not self._is_up.wait(limits.start_s):
            self._warn(f"has not started within {limits.start_s:g} s; its records wait")
        if self._refusal is not None:
            raise self._refusal

    def log(self, metrics: Metrics, step: int) -> None:
        record = dict(metrics)
        self.submit(lambda sink: sink.log(record, step))

    def submit(self, record: Callable[[SinkT], object]) -> None:
        """Have the sink's thread call `record`. If too many wait already, it is dropped."""
        if self._queue.qsize() < self._limits.waiting:
            self._queue.put(record)
        else:
            self._lost += 1
            self._warn(f"does not answer: {count_of('record', self._limits.waiting)} wait for it, and more are dropped")

    def close(self, exit_code: int = 0) -> None:
        self.begin_close(exit_code)
        self.wait_closed(time.monotonic() + self._limits.close_s)

    def begin_close(self, exit_code: int) -> None:
        """Ask the thread to end after the records that wait."""
        self._exit_code = exit_code
        self._queue.put(None)

    def wait_closed(self, deadline_s: float) -> None:
        """Wait until the thread has ended, or the monotonic clock shows `deadline_s`."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            waiting = sum(record is not None for record in list(self._queue.queue))
            get_logger().warning(
                f"{self.name} did not finish in time and was abandoned; "
                f"{count_of('record', waiting + self._lost)} may be missing in it"
            )
        elif self._lost:
            get_logger().warning(f"{self.name} is missing {count_of('record', self._lost)}")

    def _serve(self, start: Callable[[], SinkT]) -> None:
        try:
            sink = start()
        except RunError as error:
            self._refusal = error
            return
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a package may raise anything, and the run continues
            self._warn(f"cannot start: {_described(error)}")
            self._is_up.set()  # the run goes on while this thread discards its records
            self._discard()
            return
        finally:
            self._is_up.set()
        while (record := self._queue.get()) is not None:
            try:
                record(sink)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
                self._lost += 1
                self._warn(f"cannot log: {_described(error)}")
        try:
            sink.close(self._exit_code)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            self._warn(f"cannot finish: {_described(error)}")

    def _discard(self) -> None:
        while self._queue.get() is not None:
            self._lost += 1

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            get_logger().warning(f"{self.name} {what}. The run continues; metrics.jsonl has every value")


class GuardedTables(Guarded[Any]):
    """A guarded sink that also takes tables and histograms."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self.submit(lambda sink: sink.log_table(name, columns, rows, step))

    def log_distributions(self, values: Mapping[str, Sequence[float]], step: int) -> None:
        self.submit(lambda sink: sink.log_distributions(values, step))


def close_all(sinks: Sequence[Guarded[Any]], exit_code: int, limit_s: float = LIMITS.close_s) -> None:
    """Close several sinks at the same time."""
    for sink in sinks:
        sink.begin_close(exit_code)
    deadline_s = time.monotonic() + limit_s
    for sink in sinks:
        sink.wait_closed(deadline_s)


def _described(error: BaseException) -> str:
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


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
