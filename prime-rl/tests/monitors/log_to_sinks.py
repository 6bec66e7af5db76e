"""Logs one attempt of a run to every sink of `[monitor]`, as a component does. Started by the tests."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from prime_rl.configs.shared import MonitorConfig
from prime_rl.monitors.sinks import Limits, SinkRun, open_sinks
from prime_rl.run.paths import RunPaths

PATIENT = Limits(start_s=500, close_s=500)


def main(root: str, component: str, first: str, last: str, *sinks: str) -> None:
    logging.basicConfig(level="WARNING")
    config = MonitorConfig.model_validate({sink: {} for sink in sinks})
    settings = {"model": {"name": "tiny"}, "max_steps": 5}
    run = SinkRun(component, RunPaths(Path(root)), settings, resumes=int(first) > 0)
    opened = open_sinks(None, config, run, Path(root), PATIENT)
    for step in range(int(first), int(last)):
        opened.log({"loss/mean": 10.0 * int(first) + step, "optim/lr": float("nan"), "perf/device": "cpu"}, step)
    opened.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
