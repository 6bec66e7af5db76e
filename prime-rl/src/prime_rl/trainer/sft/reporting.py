"""What an SFT run tells about a step: a line on the log, metrics, the progress bar."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass

from prime_rl.configs.sft import SFTConfig
from prime_rl.trainer.ckpt import Progress
from prime_rl.trainer.perf import Throughput, flops_per_token, peak_flops, peak_memory_gib, total_memory_gib
from prime_rl.trainer.progress_bar import ProgressBar
from prime_rl.trainer.world import World
from prime_rl.utils.logger import SUCCESS, get_logger
from prime_rl.utils.monitor import JsonlMonitor, Monitor, MultiMonitor
from prime_rl.utils.paths import RunPaths

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class StepStats:
    """Figures of one optimizer step, over all processes."""

    loss: float
    """Mean cross-entropy of the trained tokens, before the update."""
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    samples: int
    forward_backward_s: float


@dataclass(frozen=True, slots=True)
class ValStats:
    """One look at the validation data, over all processes."""

    loss: float
    """Mean cross-entropy of its trained tokens."""
    seconds: float

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


class StepReporter:
    """Reports steps on the main process; elsewhere it keeps silent."""

    def __init__(self, config: SFTConfig, paths: RunPaths, model, world: World, bar: ProgressBar) -> None:
        self.paths = paths
        self.world = world
        self.bar = bar
        self.monitor = _setup_monitor(config, paths) if world.is_main else MultiMonitor([])
        self._throughput = Throughput()
        peak = peak_flops(world.device)
        self._flops_share = flops_per_token(model, config.data.seq_len) / peak if peak else None
        self._save_s = 0.0
        self._lap_s = time.perf_counter()

    def saved(self, seconds: float) -> None:
        """Note the time of a checkpoint; the next step's report includes it."""
        self._save_s = seconds

    def validated(self, step: int, stats: ValStats) -> None:
        """Report the validation of the model after `step` updates. The next step's time does not count it."""
        self._lap_s = time.perf_counter()
        if not self.world.is_main:
            return
        metrics = {"val/loss": stats.loss, "val/perplexity": stats.perplexity, "time/val": stats.seconds}
        self.monitor.log(metrics, step)
        get_logger().info(
            f"Validation after {step} steps | Loss: {stats.loss:.4f} | Perplexity: {stats.perplexity:.2f} | "
            f"Time: {stats.seconds:.2f}s"
        )

    def record(self, progress: Progress, epoch: int, stats: StepStats) -> None:
        """Report the step that made `progress.step`; steps are counted from 0."""
        now_s = time.perf_counter()
        step_s, self._lap_s = now_s - self._lap_s, now_s
        rate = self._throughput.step(stats.tokens, now_s)
        if not self.world.is_main:
            return
        metrics = {
            "loss/mean": stats.loss,
            "optim/lr": stats.lr,
            "optim/grad_norm": stats.grad_norm,
            "progress/epoch": epoch,
            "progress/num_samples": progress.samples,
            "progress/num_tokens": progress.tokens,
            "perf/throughput": rate,
            "perf/throughput_per_gpu": rate / self.world.world_size,
            "perf/peak_memory": peak_memory_gib(self.world.device),
            "time/step": step_s,
            "time/forward_backward": stats.forward_backward_s,
            "time/save_ckpt": self._save_s,
            **self._disk(),
        }
        if self._flops_share is not None:
            metrics["perf/mfu"] = 100 * self._flops_share * rate / self.world.world_size
        self._save_s = 0.0
        self.monitor.log(metrics, progress.step - 1)
        get_logger().log(SUCCESS, self._line(metrics, progress.step - 1))
        self.bar.update(progress.step, f"loss {stats.loss:.4f}  {rate:,.0f} tokens/s")

    def _line(self, metrics: dict[str, float], step: int) -> str:
        total_gib = total_memory_gib(self.world.device)
        memory = f"{metrics['perf/peak_memory']:.1f}/{total_gib:.1f} GiB"
        mfu = f" | MFU: {metrics['perf/mfu']:.1f}%" if "perf/mfu" in metrics else ""
        return (
            f"Step {step} | Time: {metrics['time/step']:.2f}s | Loss: {metrics['loss/mean']:.4f} | "
            f"Grad. Norm: {metrics['optim/grad_norm']:.4f} | LR: {metrics['optim/lr']:.2e} | "
            f"Throughput: {metrics['perf/throughput']:.0f} tokens/s{mfu} | Peak Mem.: {memory}"
        )

    def _disk(self) -> dict[str, float]:
        usage = shutil.disk_usage(self.paths.root)
        return {
            "system/ckpt_disk_free_gib": usage.free / _GIB,
            "system/ckpt_disk_used_gib": usage.used / _GIB,
            "system/ckpt_disk_total_gib": usage.total / _GIB,
            "system/ckpt_disk_free_ratio": usage.free / usage.total,
        }


def _setup_monitor(config: SFTConfig, paths: RunPaths) -> Monitor:
    monitors: list[Monitor] = [JsonlMonitor(paths.metrics, "sft")]
    if config.wandb is not None:
        from prime_rl.utils.monitor.wandb import WandbMonitor

        monitors.append(WandbMonitor(config.wandb, paths.root, config.model_dump(mode="json")))
    return MultiMonitor(monitors)
