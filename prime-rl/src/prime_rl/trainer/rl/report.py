"""What people and programs see of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from prime_rl.trainer.ckpt import Progress
from prime_rl.trainer.perf import Throughput, flops_per_token, peak_flops, peak_memory_gib
from prime_rl.trainer.rl.metrics import NAN, training_metrics
from prime_rl.trainer.rl.step import StepSize
from prime_rl.trainer.world import World
from prime_rl.utils.logger import SUCCESS, get_logger
from prime_rl.utils.monitor import Monitor


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step's outcome."""

    step: int
    size: StepSize
    values: Mapping[str, Tensor]
    """Measured values by metric; empty but on rank 0."""
    grad_norm: float
    """Before clipping; the mean over the step's updates."""
    lr: float
    """The rate that the step's update used."""


class Reporter:
    """Logs a line and the metrics of each step, on rank 0."""

    def __init__(self, monitor: Monitor, world: World, progress: Progress, model: nn.Module, row_tokens: int) -> None:
        self.monitor = monitor
        self.world = world
        self.progress = progress
        self._throughput = Throughput()
        peak = peak_flops(world.device)
        self._flops_share = flops_per_token(model, row_tokens) / (peak * world.world_size) if peak else None

    def report(self, report: StepReport, times_s: Mapping[str, float]) -> None:
        if not self.world.is_main:
            return
        metrics = training_metrics(report.values) | self._performance(report.size.tokens) | dict(times_s)
        metrics |= {
            "optim/lr": report.lr,
            "optim/grad_norm": report.grad_norm,
            "progress/tokens": self.progress.tokens,
            "progress/samples": self.progress.samples,
        }
        self.monitor.log(metrics, report.step)
        get_logger().log(SUCCESS, self._line(report.step, metrics))

    def _performance(self, tokens: int) -> dict[str, float]:
        tokens_per_s = self._throughput.step(tokens)
        performance = {
            "perf/throughput": tokens_per_s,
            "perf/throughput_per_gpu": tokens_per_s / self.world.world_size,
            "perf/peak_memory": peak_memory_gib(self.world.device),
        }
        if self._flops_share is not None:
            performance["perf/mfu"] = 100 * tokens_per_s * self._flops_share
        return performance

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        fields = [
            f"Step {step}",
            f"Time: {metrics['time/step']:.2f}s",
            f"Loss: {metrics.get('loss/mean', NAN):.4f}",
            f"Entropy: {metrics.get('entropy/mean', NAN):.4f}",
            f"Mismatch KL: {metrics.get('mismatch_kl/mean', NAN):.4f}",
            f"Grad. Norm: {metrics['optim/grad_norm']:.4f}",
            f"LR: {metrics['optim/lr']:.2e}",
            f"Throughput: {metrics['perf/throughput']:.0f} tokens/s",
        ]
        if "perf/mfu" in metrics:
            fields.append(f"MFU: {metrics['perf/mfu']:.1f}%")
        fields.append(f"Peak Mem.: {metrics['perf/peak_memory']:.1f} GiB")
        return " | ".join(fields)
