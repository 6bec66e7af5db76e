"""MLflow: a SQLite file, or a tracking server."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prime_rl.configs.shared import MlflowConfig
from prime_rl.monitors.base import Metrics
from prime_rl.monitors.sinks.described import SinkRun, numbers
from prime_rl.utils.tables import dotted, leaves

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
