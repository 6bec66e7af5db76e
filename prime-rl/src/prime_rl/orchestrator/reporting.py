"""Where the report of a step goes: the monitors, the log, and now and then a sample to read."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.orchestrator.batch import Batch
from prime_rl.orchestrator.ckpt import Progress
from prime_rl.orchestrator.extras import Extras
from prime_rl.orchestrator.filters import Filter
from prime_rl.orchestrator.metrics import (
    StepStatus,
    StepTimes,
    environment_metrics,
    log_line,
    progress_metrics,
    reward_metrics,
    rollout_metrics,
    sample_text,
    status_metrics,
)
from prime_rl.utils.logger import SUCCESS, get_logger
from prime_rl.utils.monitor import JsonlMonitor, Monitor, MultiMonitor
from prime_rl.utils.monitor.bench import BenchTable
from prime_rl.utils.paths import OrchestratorPaths, RunPaths

SAMPLE_INTERVAL = 10


class Reporter:
    """Reports steps. Samples are logged every `sample_interval` steps; None logs none."""

    def __init__(
        self,
        monitor: Monitor,
        filters: list[Filter],
        sample_interval: int | None = SAMPLE_INTERVAL,
        extras: Extras | None = None,
    ) -> None:
        self.monitor = monitor
        self.filters = filters
        self.sample_interval = sample_interval
        self.extras = extras

    def record(
        self, batch: Batch, progress: Progress, status: StepStatus, times: StepTimes, extra: dict[str, float]
    ) -> None:
        """Report the step that `progress` has just completed."""
        step = progress.step - 1
        metrics = {
            **progress_metrics(batch, progress, status.policy_version),
            **rollout_metrics(batch),
            **reward_metrics(batch.groups),
            **environment_metrics(batch.rollouts, self.filters),
            **status_metrics(batch.groups, status),
            **{f"time/{name}": value for name, value in asdict(times).items()},
            **extra,
        }
        metrics["perf/throughput"] = metrics["progress/tokens"] / max(times.generate_completions, 1e-9)
        self.monitor.log(metrics, step)
        get_logger().log(SUCCESS, log_line(step, metrics))
        if self.extras is not None:
            self.extras.record(batch, step)
        if self.sample_interval and step % self.sample_interval == 0:
            # A choice of its own, so that looking at samples does not disturb what is sampled.
            sample = random.Random(step).choice(batch.rollouts)
            get_logger().info(f"A sample of step {step}: {sample_text(sample)}")

    def close(self, exit_code: int) -> None:
        self.monitor.close(exit_code)


def setup_monitor(config: OrchestratorConfig, run: RunPaths, paths: OrchestratorPaths) -> tuple[Monitor, Extras | None]:
    """Always `OUT/metrics.jsonl`; W&B when configured, and a table at the end of a benchmark."""
    extras = None
    monitors: list[Monitor] = [JsonlMonitor(run.metrics, "orchestrator")]
    if config.bench:
        monitors.append(BenchTable({"time/step": "Step time (s)", "perf/throughput": "Throughput (tokens/s)"}))
    if config.wandb is not None:
        # Imported late: wandb costs half a second.
        from prime_rl.utils.monitor.wandb import WandbMonitor

        wandb = WandbMonitor(config.wandb, paths.root, _plain(config))
        monitors.append(wandb)
        extras = Extras(wandb, config.wandb.log_extras) if config.wandb.log_extras else None
    return MultiMonitor(monitors), extras


def sample_interval(config: OrchestratorConfig) -> int | None:
    """Steps between two logged samples; `wandb.log_extras` changes or silences it."""
    if config.wandb is None:
        return SAMPLE_INTERVAL
    extras = config.wandb.log_extras
    return extras.interval if extras is not None and extras.samples else None


def _plain(config: OrchestratorConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")
