"""The RL training loop."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from prime_rl.configs.trainer import TrainerConfig, WeightCheckpointConfig
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.checkpoints.manager import CheckpointManager
from prime_rl.trainer.checkpoints.state import TrainState
from prime_rl.trainer.checkpoints.weights import export_model
from prime_rl.trainer.optim.optimizer import clip_gradients
from prime_rl.trainer.process.data_axis import DataAxis
from prime_rl.trainer.process.errors import DivergedError
from prime_rl.trainer.process.signals import SignalBox
from prime_rl.trainer.process.world import Process
from prime_rl.trainer.rl.batches import BatchSource
from prime_rl.trainer.rl.broadcast import Broadcast
from prime_rl.trainer.rl.metrics import Samples, Stopwatch
from prime_rl.trainer.rl.parity import ParityGate
from prime_rl.trainer.rl.report import Reporter, StepReport
from prime_rl.trainer.rl.rows import Row
from prime_rl.trainer.rl.step import ForwardBackward, StepSize
from prime_rl.utils.logger import get_logger

POLL_S = 0.02
"""Between two looks for a batch. A tiny model's step takes a few tenths of a second, so a long poll would show."""


class Stopped(Exception):
    """SIGTERM asked the trainer to stop; the checkpoint, if one is configured, is written."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop works with."""

    state: TrainState
    tokenizer: PreTrainedTokenizerBase
    batches: BatchSource
    data_axis: DataAxis
    forward_backward: ForwardBackward
    parity: ParityGate
    broadcast: Broadcast
    checkpoints: CheckpointManager | None
    reporter: Reporter
    export_dtype: torch.dtype
    """Of published and exported weights."""


class RLTrainer:
    """Consumes one batch a step and publishes the new policy, until `max_steps`.

    Step s turns policy version s into version s + 1; `progress.step` is the version.
    """

    def __init__(
        self, config: TrainerConfig, paths: RunPaths, process: Process, parts: Parts, signals: SignalBox
    ) -> None:
        self.config = config
        self.paths = paths
        self.process = process
        self.parts = parts
        self.signals = signals
        self.progress = parts.state.progress
        self.times = Stopwatch()
        self._saved_version = self.progress.step

    def run(self) -> None:
        """Train to the end.

        Raises:
            Stopped: SIGTERM came first.
        """
        if self.progress.step > 0:
            self._publish()  # whoever resumes with us cannot go on without the version that we stand at
        while self.config.max_steps is None or self.progress.step < self.config.max_steps:
            rows = self._receive()
            report = self._train_step(rows)
            self._publish()
            self._save_if_due()
            self.parts.reporter.report(report, self.times.lap())
        self._finish()

    def _receive(self) -> list[Row]:
        """Wait for this data rank's rows, serving signals meanwhile. Collective."""
        with self.times("wait_for_batch"):
            while True:
                requests = self.signals.take()
                if requests.save or requests.stop:
                    self._save()
                if requests.stop:
                    raise Stopped
                if self._batch_is_ready():
                    break
                time.sleep(POLL_S)
        with self.times("load_data"):
            return [Row.of(message, self.process.device) for message in self.parts.batches.take(self.progress.step)]

    def _batch_is_ready(self) -> bool:
        """Rank 0 looks; every rank hears, so that none runs ahead into another collective."""
        ready = torch.tensor(int(self.process.is_main and self.parts.batches.is_ready(self.progress.step)))
        dist.broadcast(ready, src=0)
        return bool(ready)

    def _train_step(self, rows: list[Row]) -> StepReport:
        step, lr = self.progress.step, self.parts.state.policy.scheduler.get_last_lr()[0]
        self.parts.parity.check(rows, self.parts.forward_backward, version=step)
        samples, sizes, grad_norms = Samples(), [], []
        with self.times("forward_backward"):
            for part in self._minibatches(rows):
                sizes.append(StepSize.of_all_ranks(part, self.parts.data_axis))
                samples.extend(self.parts.forward_backward.run(part, sizes[-1]))
                grad_norms.append(self._update_weights())
            self.parts.state.policy.scheduler.step()
        size = StepSize.total(sizes)
        self.progress.advance(size.tokens, size.sequences)
        return StepReport(step, size, samples.gather(self.parts.data_axis), sum(grad_norms) / len(grad_norms), lr)

    def _minibatches(self, rows: list[Row]) -> list[list[Row]]:
        """The rows of each optimizer update, one after the other."""
        count = 1 + max(row.minibatch for row in rows)
        if count > 1 and self.parts.forward_backward.loss.needs_proximal:
            rows = self.parts.forward_backward.with_proximal(rows)
        return [[row for row in rows if row.minibatch == index] for index in range(count)]

    def _update_weights(self) -> float:
        """Apply the gradient; its norm before clipping."""
        state = self.parts.state
        grad_norm = clip_gradients(state.policy.model, self.config.optim.max_norm)
        if not math.isfinite(grad_norm):
            raise DivergedError(
                f"the gradient of step {self.progress.step} is not finite: lower optim.lr, or check the rewards"
            )
        state.policy.optimizer.step()
        state.policy.optimizer.zero_grad()
        return grad_norm

    def _publish(self) -> None:
        with self.times("broadcast_weights"):
            self.parts.broadcast.publish(self.parts.state.policy.model, self.progress.step, self.parts.export_dtype)

    def _save_if_due(self) -> None:
        checkpoints, step = self.parts.checkpoints, self.progress.step
        if checkpoints is None or not checkpoints.is_due(step) or step == self.config.max_steps:
            return
        self._save()
        self._export()

    def _save(self) -> None:
        """Checkpoint this version, unless it is the untrained model or already saved."""
        if self.parts.checkpoints is None or self.progress.step == self._saved_version:
            return
        with self.times("save_ckpt"):
            self.parts.checkpoints.save(self.parts.state, data_position={})
        self._saved_version = self.progress.step
        if self.process.is_main:
            done = "Copied the state for" if self.parts.checkpoints.config.async_save else "Saved"
            get_logger().info(f"{done} checkpoint {self.paths.checkpoint(self.progress.step)}")

    def _export(self) -> None:
        parts = self.parts
        if parts.checkpoints is not None:
            parts.checkpoints.export(parts.state, parts.tokenizer, parts.export_dtype)
            return
        target = self.paths.weight(self.progress.step)
        export_model(parts.state.policy.model, parts.tokenizer, target, WeightCheckpointConfig(), parts.export_dtype)

    def _finish(self) -> None:
        """A finished run leaves its weights ready to use, and with `[ckpt]` a checkpoint to go on from."""
        self._save()
        if self.config.bench is None:
            self._export()
