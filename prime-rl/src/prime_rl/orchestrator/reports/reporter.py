"""Reports each step to the monitors and the log, and logs a sample rollout every few steps."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.shared import LogExtrasConfig
from prime_rl.monitors import JsonlMonitor, Monitor, MultiMonitor
from prime_rl.monitors.bench import BenchTable
from prime_rl.monitors.prometheus import ORCHESTRATOR, MetricsServer
from prime_rl.monitors.sinks.described import SinkRun
from prime_rl.monitors.sinks.opening import open_sinks
from prime_rl.orchestrator.batches.batch import Batch, Filter
from prime_rl.orchestrator.ckpt import Progress
from prime_rl.orchestrator.reports.metrics import (
    StepStatus,
    StepTimes,
    environment_metrics,
    log_line,
    part_metrics,
    progress_metrics,
    reward_metrics,
    rollout_metrics,
    sample_text,
    status_metrics,
)
from prime_rl.orchestrator.reports.reward_watch import RewardWatch, reward_parts
from prime_rl.orchestrator.rollouts.rollout import Rollout
from prime_rl.run.paths import OrchestratorPaths, RunPaths
from prime_rl.utils.logger import SUCCESS, get_logger

SAMPLE_INTERVAL = 10


class Reporter:
    """Reports steps. Logs a sample every `sample_interval` steps; None logs no samples."""

    def __init__(
        self,
        monitor: Monitor,
        filters: list[Filter],
        sample_interval: int | None = SAMPLE_INTERVAL,
        extras: Extras | None = None,
        reward_watch: RewardWatch | None = None,
    ) -> None:
        self.monitor = monitor
        self.filters = filters
        self.reward_watch = reward_watch or RewardWatch({})
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
            **part_metrics(reward_parts(batch.rollouts, self.reward_watch.parts)),
            **environment_metrics(batch.rollouts, self.filters),
            **status_metrics(batch.groups, status),
            **{f"time/{name}": value for name, value in asdict(times).items()},
            **extra,
        }
        metrics["perf/throughput"] = metrics["progress/tokens"] / max(times.generate_completions, 1e-9)
        self.monitor.log(metrics, step)
        get_logger().log(SUCCESS, log_line(step, metrics))
        for warning in self.reward_watch.observe(step, batch.groups):
            get_logger().warning(warning)
        if self.extras is not None:
            self.extras.record(batch, step)
        if self.sample_interval and step % self.sample_interval == 0:
            # A separate generator, so that logging does not change which examples are drawn.
            sample = random.Random(step).choice(batch.rollouts)
            get_logger().info(f"A sample of step {step}: {sample_text(sample)}")

    def close(self, exit_code: int) -> None:
        self.monitor.close(exit_code)


def setup_monitor(config: OrchestratorConfig, run: RunPaths, paths: OrchestratorPaths) -> tuple[Monitor, Extras | None]:
    """Create the monitors: `OUT/metrics.jsonl`, the sinks that are configured, and a summary table with `bench`."""
    extras = None
    monitors: list[Monitor] = [JsonlMonitor(run.metrics, "orchestrator")]
    if config.metrics_server is not None:
        monitors.append(MetricsServer(config.metrics_server, gauges=ORCHESTRATOR))
    if config.bench:
        monitors.append(BenchTable({"time/step": "Step time (s)", "perf/throughput": "Throughput (tokens/s)"}))
    resumes = config.ckpt is not None and config.ckpt.resume_step is not None
    sinks = open_sinks(
        config.wandb, config.monitor, SinkRun("orchestrator", run, config.model_dump(mode="json"), resumes), paths.root
    )
    monitors.append(sinks)
    if config.wandb is not None and config.wandb.log_extras is not None and sinks.wandb is not None:
        extras = Extras(sinks.wandb, config.wandb.log_extras)
    return MultiMonitor(monitors), extras


def sample_interval(config: OrchestratorConfig) -> int:
    """Steps between two samples in the log. With W&B, `wandb.log_extras` sets it."""
    extras = None if config.wandb is None else config.wandb.log_extras
    return SAMPLE_INTERVAL if extras is None else extras.interval


COLUMNS = ("step", "task", "example_id", "messages", "input_ids", "reward")
MAX_SAMPLES = 8


class ExtrasMonitor(Protocol):
    """The part of the W&B monitor that `Extras` uses."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None: ...

    def log_distributions(self, values: Mapping[str, Sequence[float]], step: int) -> None: ...


class Extras:
    """Logs what `log_extras` enables: a table of up to 8 rollouts, and histograms of rewards and advantages."""

    def __init__(self, monitor: ExtrasMonitor, config: LogExtrasConfig) -> None:
        self.monitor = monitor
        self.config = config

    def record(self, batch: Batch, step: int) -> None:
        """Log the batch of `step`, if `step` is a multiple of `interval`."""
        if step % self.config.interval:
            return
        rollouts = batch.rollouts
        if self.config.samples:
            # A separate generator, so that logging does not change which examples are drawn.
            chosen = random.Random(step).sample(rollouts, min(MAX_SAMPLES, len(rollouts)))
            self.monitor.log_table("samples", COLUMNS, [sample_row(each, step) for each in chosen], step)
        if self.config.distributions:
            values = {
                "distributions/rewards": [rollout.reward for rollout in rollouts],
                "distributions/advantages": [rollout.advantage or 0.0 for rollout in rollouts],
            }
            self.monitor.log_distributions(values, step)


def sample_row(rollout: Rollout, step: int) -> list[Any]:
    """One row of the table; the token ids are those of the last model call."""
    last = rollout.trace.calls[-1] if rollout.trace else None
    ids = last.prompt_ids + last.completion_ids if last is not None else []
    return [step, rollout.example.env, rollout.example.row, sample_text(rollout), str(ids), rollout.reward]
