"""TensorBoard: one folder of event files for each part of a run."""

from __future__ import annotations

import time

from prime_rl.configs.shared import TensorBoardConfig
from prime_rl.monitors.base import Metrics
from prime_rl.monitors.sinks.described import SinkRun, numbers

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
