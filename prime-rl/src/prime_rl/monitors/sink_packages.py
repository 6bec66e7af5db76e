"""Sinks of metrics in other packages: MLflow, SwanLab, TensorBoard, Trackio, Weights & Biases.

Each imports its package when it starts, and gives all attempts of a run one id.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.configs.shared import MlflowConfig, SwanLabConfig, TensorBoardConfig, TrackioConfig, WandbConfig
from prime_rl.monitors.base import Metrics
from prime_rl.run.paths import RunPaths
from prime_rl.utils.errors import RunError
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import get_logger
from prime_rl.utils.tables import dotted, leaves

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
