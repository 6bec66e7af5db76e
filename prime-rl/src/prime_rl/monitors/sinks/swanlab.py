"""SwanLab: files for a later `swanlab sync`, or its server."""

from __future__ import annotations

from prime_rl.configs.shared import SwanLabConfig
from prime_rl.monitors.base import Metrics
from prime_rl.monitors.sinks.described import SinkRun, numbers


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
