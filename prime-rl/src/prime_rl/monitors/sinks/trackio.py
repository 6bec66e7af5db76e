"""Trackio: metrics in a SQLite file, or in a Hugging Face Space that the config names."""

from __future__ import annotations

import os

from prime_rl.configs.shared import TrackioConfig
from prime_rl.monitors.base import Metrics
from prime_rl.monitors.sinks.described import SinkRun, numbers

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
