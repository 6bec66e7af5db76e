"""Reports SFT steps: log line, metrics, progress bar, and a summary at the end."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field

from prime_rl.run.paths import RunPaths
from prime_rl.trainer.checkpoints.state import Progress
from prime_rl.trainer.perf import Performance, speed_fields
from prime_rl.trainer.process.mesh import DataAxis
from prime_rl.trainer.sft.data.samples import SampleCounts, SampleStream
from prime_rl.trainer.telemetry import Telemetry
from prime_rl.utils.logger import SUCCESS, count_of, get_logger
from prime_rl.watch.progress import ProgressBar, clock, figures

_GIB = 2**30
_EDGE_STEPS = 5
"""The summary compares the mean loss of this many first and last steps."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of one optimizer step, over all processes."""

    loss: float
    """Before the update. In SFT, the mean cross-entropy of the trained tokens."""
    grad_norm: float
    """Gradient norm before clipping."""
    lr: float
    tokens: int
    samples: int
    forward_backward_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics of the objective, by name."""


@dataclass(frozen=True, slots=True)
class ValStats:
    """Result of one validation, over all processes."""

    loss: float
    """In SFT, the mean cross-entropy of the trained tokens."""
    seconds: float
    metrics: Mapping[str, float] | None = None
    """Further metrics of the objective, by name. None in SFT, whose loss is that of a language model."""

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


class StepReporter:
    """Reports steps on the main process; does nothing on the others."""

    def __init__(
        self,
        paths: RunPaths,
        telemetry: Telemetry,
        performance: Performance,
        data_axis: DataAxis,
        bar: ProgressBar,
    ) -> None:
        self.paths = paths
        self.telemetry = telemetry
        self.performance = performance
        self.process = performance.process
        self.data_axis = data_axis
        self.bar = bar
        self.summary = Summary()
        self._save_s = 0.0
        self._lap_s = time.perf_counter()

    def saved(self, seconds: float) -> None:
        """Add the duration of a checkpoint or an export to the next step's report."""
        self._save_s += seconds

    def validated(self, step: int, stats: ValStats) -> None:
        """Report the validation after `step` updates. Its time does not count in the next step."""
        self._lap_s = time.perf_counter()
        self.performance.leave_out(stats.seconds)
        if not self.process.is_main:
            return
        if stats.metrics is None:
            others = {"val/perplexity": stats.perplexity}
            shown = f"Perplexity: {stats.perplexity:.2f}"
        else:
            others = {f"val/{name}": value for name, value in stats.metrics.items()}
            shown = " | ".join(_shown(stats.metrics))
        self.telemetry.monitor.log({"val/loss": stats.loss, **others, "time/val": stats.seconds}, step)
        get_logger().info(
            f"Validation after {step} steps | Loss: {stats.loss:.4f} | {shown} | Time: {stats.seconds:.2f}s"
        )

    def record(self, progress: Progress, stream: SampleStream, stats: StepStats) -> None:
        """Report the step that has just been completed. Reports count steps from 0. A collective call."""
        now_s = time.perf_counter()
        step_s, self._lap_s = now_s - self._lap_s, now_s
        step = progress.step - 1
        self.telemetry.profile.step(step)
        totals = self.data_axis.sum(astuple(stream.counts), self.process.device)
        counts = SampleCounts(*map(int, totals))
        if not self.process.is_main:
            return
        metrics = {
            "loss/mean": stats.loss,
            **stats.metrics,
            "optim/lr": stats.lr,
            "optim/grad_norm": stats.grad_norm,
            "progress/epoch": stream.epoch,
            "progress/num_samples": progress.samples,
            "progress/num_tokens": progress.tokens,
            "time/step": step_s,
            "time/forward_backward": stats.forward_backward_s,
            "time/save_ckpt": self._save_s,
            **{f"data/{kind}": count for kind, count in asdict(counts).items()},
            **self.performance.step(stats.tokens),
            **self._disk(),
        }
        self._save_s = 0.0
        self.summary.add(stats, counts)
        self.telemetry.monitor.log(metrics, step)
        get_logger().log(SUCCESS, self._line(metrics, step))
        self.bar.update(progress.step, figures(metrics))

    def _line(self, metrics: dict[str, float], step: int) -> str:
        memory = f"{metrics['perf/peak_memory']:.1f}/{self.performance.total_memory_gib:.1f} GiB"
        fields = [
            f"Step {step}",
            f"Time: {metrics['time/step']:.2f}s",
            f"Loss: {metrics['loss/mean']:.4f}",
            *_shown(metrics),
            f"Grad. Norm: {metrics['optim/grad_norm']:.4f}",
            f"LR: {metrics['optim/lr']:.2e}",
            *speed_fields(metrics),
            f"Peak Mem.: {memory}",
        ]
        return " | ".join(fields)

    def _disk(self) -> dict[str, float]:
        usage = shutil.disk_usage(self.paths.root)
        return {
            "system/ckpt_disk_free_gib": usage.free / _GIB,
            "system/ckpt_disk_used_gib": usage.used / _GIB,
            "system/ckpt_disk_total_gib": usage.total / _GIB,
            "system/ckpt_disk_free_ratio": usage.free / usage.total,
        }


def _shown(metrics: Mapping[str, float]) -> list[str]:
    """The metrics of preferences and of reward models that log lines show."""
    names = {
        "rewards/accuracies": "Accuracy",
        "rewards/margins": "Margin",
        "accuracy": "Accuracy",
        "margin": "Margin",
    }
    return [f"{title}: {metrics[name]:.4f}" for name, title in names.items() if name in metrics]


class Summary:
    """Summary of a run since it was started or resumed."""

    def __init__(self) -> None:
        self._started_s = self._ended_s = time.perf_counter()
        self._losses: list[float] = []
        self._tokens = 0
        self._counts = SampleCounts()

    def add(self, stats: StepStats, counts: SampleCounts) -> None:
        self._losses.append(stats.loss)
        self._tokens += stats.tokens
        self._counts = counts
        self._ended_s = time.perf_counter()

    def lines(self) -> list[str]:
        """Two lines: steps, tokens, time and loss; and counts of the rows read so far, across resumes."""
        if not self._losses:
            return []
        elapsed_s = self._ended_s - self._started_s
        counts = asdict(self._counts)
        fates = ", ".join(f"{counts[kind]:,} {words}" for kind, words in _FATES.items() if counts[kind])
        return [
            f"{count_of('step', len(self._losses))} and {self._tokens:,} tokens in {clock(elapsed_s)} "
            f"({self._tokens / elapsed_s:,.0f} tokens/s); loss {self._loss_course()}",
            f"Rows read so far: {counts['seen']:,}"
            + (f"; {fates}" if fates else "; none was cut to data.seq_len or skipped"),
        ]

    def _loss_course(self) -> str:
        """Mean losses of the first and the last steps, which have no step in common."""
        edge = min(_EDGE_STEPS, len(self._losses) // 2)
        if edge == 0:
            return f"{self._losses[0]:.4f}"
        first, last = (sum(losses) / edge for losses in (self._losses[:edge], self._losses[-edge:]))
        compared = "first and last step" if edge == 1 else f"first and last {edge} steps"
        return f"{first:.4f} -> {last:.4f} ({compared})"


_FATES = {
    "truncated": "cut to data.seq_len",
    "split": "split into several samples",
    "overlong": "skipped: too long",
    "untrainable": "skipped: no trained token",
    "unmaskable": "skipped: messages not found",
    "bad": "skipped: no conversation or answer",
}
