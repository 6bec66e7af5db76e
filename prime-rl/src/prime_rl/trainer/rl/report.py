"""Reports each training step: one log line for people, and metrics for monitors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from prime_rl.trainer.checkpoints.state import Progress
from prime_rl.trainer.perf import Performance, speed_fields
from prime_rl.trainer.rl.metrics import NAN, training_metrics
from prime_rl.trainer.rl.step import StepSize
from prime_rl.trainer.telemetry import Telemetry
from prime_rl.utils.logger import SUCCESS, get_logger


@dataclass(frozen=True, slots=True)
class StepReport:
    """Results of one step."""

    step: int
    size: StepSize
    values: Mapping[str, Tensor]
    """Measured values by metric name; empty on all ranks but 0."""
    grad_norm: float
    """Gradient norm before clipping, averaged over the step's optimizer updates."""
    lr: float
    """Learning rate of the step's updates."""
    stats: Mapping[str, float]
    """Values that a custom loss recorded."""


class Reporter:
    """Logs a line and the metrics of each step on rank 0."""

    def __init__(self, telemetry: Telemetry, progress: Progress, performance: Performance) -> None:
        self.telemetry = telemetry
        self.progress = progress
        self.performance = performance

    def report(self, report: StepReport, times_s: Mapping[str, float]) -> None:
        self.telemetry.profile.step(report.step)
        if not self.performance.process.is_main:
            return
        metrics = training_metrics(report.values) | self.performance.step(report.size.tokens) | dict(times_s)
        metrics |= {
            "optim/lr": report.lr,
            "optim/grad_norm": report.grad_norm,
            "progress/tokens": self.progress.tokens,
            "progress/samples": self.progress.samples,
            **{f"stats/{name}": value for name, value in report.stats.items()},
        }
        self.telemetry.monitor.log(metrics, report.step)
        get_logger().log(SUCCESS, self._line(report.step, metrics))

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        fields = [
            f"Step {step}",
            f"Time: {metrics['time/step']:.2f}s",
            f"Loss: {metrics.get('loss/mean', NAN):.4f}",
            f"Entropy: {metrics.get('entropy/mean', NAN):.4f}",
            f"Mismatch KL: {metrics.get('mismatch_kl/mean', NAN):.4f}",
            f"Grad. Norm: {metrics['optim/grad_norm']:.4f}",
            f"LR: {metrics['optim/lr']:.2e}",
            *speed_fields(metrics),
            f"Peak Mem.: {metrics['perf/peak_memory']:.1f} GiB",
        ]
        return " | ".join(fields)
