"""Opens the sinks of metrics that a config turns on, each in its own thread: one that hangs does not stop a run."""

from __future__ import annotations

import fcntl
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any, Generic, TypeVar

from prime_rl.configs.shared import (
    MlflowConfig,
    MonitorConfig,
    SwanLabConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandbConfig,
)
from prime_rl.monitors.base import Metrics, Monitor
from prime_rl.run.paths import RunPaths
from prime_rl.utils.errors import RunError, first_line
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import count_of, get_logger
from prime_rl.utils.tables import dotted, leaves

# Sinks of metrics in other packages: MLflow, SwanLab, TensorBoard, Trackio, Weights & Biases.
#
# Each imports its package when it starts, and gives all attempts of a run one id.


# The id that a sink gave the run: all attempts log under it.


@dataclass(frozen=True, slots=True)
class Attempt:
    """Keeps the id of a sink's run for later attempts of the same run."""

    id_file: Path
    resumes: bool
    sink: str = "W&B"
    advice: str = ": set wandb.id"

    def run_id(self) -> str | None:
        """The id of the attempt that this one resumes. None makes a new one."""
        if not self.resumes:
            return None
        if not self.id_file.is_file():
            get_logger().warning(
                f"{self.sink} starts a new run, because {self.id_file} with the id of the earlier one is missing"
                f"{self.advice}"
            )
            return None
        return self.id_file.read_text(encoding="utf-8").strip()

    def keep(self, run_id: str) -> None:
        self.id_file.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(self.id_file) as scratch:
            scratch.write_text(f"{run_id}\n", encoding="utf-8")


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
        """Directory of a sink; made if it is missing."""
        directory = (given or self.paths.sink(sink)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        return directory


def numbers(metrics: Metrics) -> dict[str, float]:
    """The metrics that are numbers. A sink draws curves; texts stay in `metrics.jsonl`."""
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, str)}


def finite(metrics: Metrics) -> dict[str, float]:
    """The metrics that a sink without NaN and infinities can store."""
    return {name: value for name, value in numbers(metrics).items() if math.isfinite(value)}


_PARAMS_PER_CALL = 100
_PARAM_CHARS = 500


class MlflowMonitor:
    """Logs to one run of an experiment. The settings are its parameters, and cannot change when it resumes."""

    def __init__(self, config: MlflowConfig, run: SinkRun) -> None:
        os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"}
        from mlflow import MlflowClient

        # Several processes open the same new database, which only one of them may fill with tables.
        with _locked(run.directory("control", run.paths.control) / "mlflow.lock"):
            self._client = MlflowClient(config.uri or f"sqlite:///{run.paths.mlflow.absolute()}")
            experiment = self._experiment(config, run)
        attempt = run.attempt("mlflow")
        known = attempt.run_id()
        if known is None:
            self._run_id = self._client.create_run(experiment, run_name=run.named(config.name)).info.run_id
            self._log_settings(run)
        else:
            self._run_id = known
            self._client.update_run(known, status="RUNNING")
        attempt.keep(self._run_id)

    def _experiment(self, config: MlflowConfig, run: SinkRun) -> str:
        found = self._client.get_experiment_by_name(config.project)
        if found is not None:
            return str(found.experiment_id)
        # MLflow's own default is a folder of the current directory.
        artifacts = None if config.uri else (run.paths.root.absolute() / "mlflow").as_uri()
        return str(self._client.create_experiment(config.project, artifact_location=artifacts))

    def _log_settings(self, run: SinkRun) -> None:
        from mlflow.entities import Param

        params = [
            Param(_allowed(dotted(path)), str(value)[:_PARAM_CHARS])
            for path, value in leaves(run.config)
            if value is not None
        ]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS_PER_CALL])

    def log(self, metrics: Metrics, step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        values = [Metric(_allowed(name), value, now_ms, step) for name, value in numbers(metrics).items()]
        self._client.log_batch(self._run_id, metrics=values)

    def close(self, exit_code: int = 0) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if exit_code == 0 else "FAILED")


def _allowed(name: str) -> str:
    """`name` with the characters that MLflow accepts in names."""
    return "".join(char if char.isalnum() or char in "_-. :/" else "_" for char in name)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class SwanLabMonitor:
    """Logs to one SwanLab run. It records neither the terminal, whose lines may show rollouts, nor the machine."""

    def __init__(self, config: SwanLabConfig, run: SinkRun) -> None:
        import swanlab

        nothing = dict.fromkeys(("hardware", "runtime", "requirements", "git", "monitor"), False)
        settings = swanlab.Settings(
            interactive=False,
            terminal=swanlab.Settings.Terminal(proxy_type="none"),
            probe=swanlab.Settings.Probe(**nothing),
        )
        attempt = run.attempt("swanlab")
        self._run = swanlab.init(
            project=config.project,
            name=run.named(config.name),
            mode="online" if config.online else "offline",
            log_dir=str(run.directory("swanlab", config.directory)),
            id=attempt.run_id(),
            resume="allow",
            config=dict(run.config),
            settings=settings,
        )
        attempt.keep(self._run.id)

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log(numbers(metrics), step=step)

    def close(self, exit_code: int = 0) -> None:
        if exit_code == 0:
            self._run.finish()
        else:
            self._run.finish(state="crashed", error=f"exit code {exit_code}")


FLUSH_S = 10


class TensorBoardMonitor:
    """Writes event files without importing torch. A resumed attempt hides what follows its first step."""

    def __init__(self, config: TensorBoardConfig, run: SinkRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory = run.directory("tensorboard", config.directory) / run.component
        directory.mkdir(exist_ok=True)
        self._writer = EventFileWriter(str(directory), flush_secs=FLUSH_S)
        self._hides_later_steps = run.resumes

    def log(self, metrics: Metrics, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._hides_later_steps:
            # Without this, the steps that a resume repeats would appear twice in each curve.
            self._hides_later_steps = False
            restart = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=restart))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers(metrics).items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self, exit_code: int = 0) -> None:
        self._writer.close()


_ADDRESSES = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_DATASET_ID", "TRACKIO_BUCKET_ID")


class TrackioMonitor:
    """Logs to one run of a Trackio project. Only the config can name a Space: variables with addresses are dropped."""

    def __init__(self, config: TrackioConfig, run: SinkRun) -> None:
        # Trackio reads the directory once, when it is imported.
        os.environ["TRACKIO_DIR"] = str(run.directory("trackio", config.directory))
        for variable in _ADDRESSES:
            os.environ.pop(variable, None)
        import trackio

        self._run = trackio.init(
            project=config.project,
            name=run.named(config.name),
            space_id=config.space,
            config=dict(run.config),
            resume="allow" if run.resumes else "never",
            private=True,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log(numbers(metrics), step=step)

    def close(self, exit_code: int = 0) -> None:
        self._run.finish()


class WandbMonitor:
    """Logs to one W&B run.

    `offline`, or `WANDB_MODE=offline`, writes the run to `directory` for a later `wandb sync`. `id` continues an
    earlier run.
    """

    def __init__(
        self, config: WandbConfig, directory: Path, run_config: dict[str, Any], attempt: Attempt | None = None
    ) -> None:
        """Start the run, or continue that of an earlier attempt.

        Raises:
            RunError: W&B cannot be reached, or the user is not logged in.
        """
        import wandb

        directory.mkdir(parents=True, exist_ok=True)
        run_id = config.id or (None if attempt is None else attempt.run_id())
        try:
            self._run = wandb.init(
                project=config.project,
                name=config.name,
                id=run_id,
                resume="allow",
                mode="offline" if config.offline else None,
                dir=directory,
                config=run_config,
                # The log shows samples of rollouts.
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            reason = str(error).strip().splitlines()[0]
            raise RunError(
                f"wandb: {reason}: log in with `wandb login`, or log offline with --wandb.offline"
            ) from error
        if attempt is not None:
            attempt.keep(self._run.id)

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log a table."""
        import wandb

        self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])}, step=step)

    def log_distributions(self, values: Mapping[str, Sequence[float]], step: int) -> None:
        """Log one histogram per name."""
        import wandb

        self._run.log({name: wandb.Histogram(list(of_name)) for name, of_name in values.items()}, step=step)

    def close(self, exit_code: int = 0) -> None:
        self._run.finish(exit_code=exit_code)


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

    # The trainers share a name, as their files do.
    part = "trainer" if run.component == "sft" else run.component
    attempt = Attempt(run.paths.wandb_id(part), run.resumes)
    return WandbMonitor(config, directory, dict(run.config), attempt)


def _starts(config: MonitorConfig, run: SinkRun) -> Iterator[tuple[str, Callable[[], Monitor]]]:
    if config.tensorboard is not None:
        yield "TensorBoard", partial(TensorBoardMonitor, config.tensorboard, run)
    if config.trackio is not None:
        yield "Trackio", partial(TrackioMonitor, config.trackio, run)
    if config.swanlab is not None:
        yield "SwanLab", partial(SwanLabMonitor, config.swanlab, run)
    if config.mlflow is not None:
        yield "MLflow", partial(MlflowMonitor, config.mlflow, run)
