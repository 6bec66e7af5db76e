"""The orchestrator's main loop: one training batch per step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from prime_rl.configs.orchestrator import SamplingConfig
from prime_rl.monitors.base import Heartbeat
from prime_rl.orchestrator.batches.advantage import AdvantageFunction, assign_advantages
from prime_rl.orchestrator.batches.batch import Batch, BatchTarget, Filter, apply_filters, build_batch, what_is_left_out
from prime_rl.orchestrator.batches.teacher import Teachers
from prime_rl.orchestrator.ckpt import Checkpoints, Progress
from prime_rl.orchestrator.early_stop import EarlyStop
from prime_rl.orchestrator.errors import OrchestratorError
from prime_rl.orchestrator.evaluator import Evaluator, Validator
from prime_rl.orchestrator.reports.reporter import Reporter, StepStatus, StepTimes, count_tokens, reward_metrics
from prime_rl.orchestrator.reports.rollout_log import RolloutLog
from prime_rl.orchestrator.rollouts.rollout import Group
from prime_rl.orchestrator.rollouts.sampling import temperature_at, train_sampling_args
from prime_rl.orchestrator.scheduling.scheduler import Scheduler
from prime_rl.orchestrator.servers.policy import Policy
from prime_rl.run.process import own_beats
from prime_rl.transport import BatchSender, TrainingBatch
from prime_rl.utils.logger import get_logger

Sleep = Callable[[float], Awaitable[None]]
MAX_EMPTY_BATCHES = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 300.0


@dataclass(slots=True)
class EmptyBatches:
    """Pauses, with exponential backoff, after batches without a token to train on. Gives up after five in a row."""

    sleep: Sleep = asyncio.sleep
    in_a_row: int = 0

    async def pause(self, step: int, why: str) -> None:
        """Pause. `why` describes the rollouts. Raises OrchestratorError after `MAX_EMPTY_BATCHES` in a row."""
        self.in_a_row += 1
        if self.in_a_row >= MAX_EMPTY_BATCHES:
            raise OrchestratorError(
                f"step {step}: {self.in_a_row} batches in a row had no token to train on; of the last one, {why}; look "
                "at the metrics error/* and filter/*, and at the log lines of failed rollouts"
            )
        own_beats().say(f"step {step}: pausing after a batch without a token to train on")
        pause_s = min(FIRST_PAUSE_S * 2 ** (self.in_a_row - 1), LONGEST_PAUSE_S)
        get_logger().warning(f"Step {step}: the batch has no token to train on: {why}; retrying in {pause_s:.0f} s")
        await self.sleep(pause_s)


@dataclass(slots=True)
class Steps:
    """The phases of a step, and the components that they use."""

    scheduler: Scheduler
    policy: Policy
    sender: BatchSender
    sending: Executor
    """Thread of the sender. Environment code can occupy all threads of the event loop."""
    reporter: Reporter
    rollout_log: RolloutLog
    heartbeat: Heartbeat
    checkpoints: Checkpoints | None
    advantage: AdvantageFunction
    filters: list[Filter]
    sampling: SamplingConfig
    target: BatchTarget
    max_steps: int | None
    length_limit: str = "their length limit"
    """Name of the limit on a prompt with its completion, for messages."""
    teacher: Teachers | None = None
    evaluator: Evaluator | None = None
    early_stop: EarlyStop | None = None
    validator: Validator | None = None
    validation: dict[str, float] = field(default_factory=dict)
    """Validation metrics of the current step."""
    loop_metrics: Callable[[], dict[str, float]] = dict
    """How late event loops are, and for how long environments block them."""
    empty: EmptyBatches = field(default_factory=EmptyBatches)
    pool_metrics: Callable[[], dict[str, float]] = dict
    free_servers: Callable[[], Awaitable[None]] | None = None
    """Frees the servers' GPU memory for the trainer, until it publishes the next weights."""
    times: StepTimes = field(default_factory=StepTimes)

    async def run(self, progress: Progress) -> None:
        """Send batches until `max_steps` or an early end, then save a final checkpoint and evaluate."""
        own_beats().started()
        while self.max_steps is None or progress.step < self.max_steps:
            # First, so that a run stopped during this step draws the same examples when it resumes.
            self.save(progress)
            if self.evaluator is not None and await self.evaluator.run_if_due(progress.step, self.scheduler):
                self.save(progress)  # with the result, so that a resumed run decides by it, too
            if self.early_stop is not None and (why := self.early_stop.why_to_end()) is not None:
                await self.end_early(why, progress.step, self.early_stop)
                break
            with self._timing("step"):
                groups = await self.collect(progress.step)
                batch = self.prepare(groups)
                if not batch.trained:
                    for group in groups:
                        self.scheduler.buffer.ledger.dropped(group.example.draw, "its batch had no token to train on")
                    await self.empty.pause(progress.step, what_is_left_out(batch, self.length_limit))
                    continue
                if self.teacher is not None:
                    await self.score(batch, progress.step, self.teacher)
                await self.send(batch, progress)
            self.report(batch, progress)
            self.heartbeat.beat()
        self.save(progress)
        if self.evaluator is not None:
            await self.evaluator.finish(progress.step)
            if self.early_stop is not None:
                self.save(progress)  # with the result, so that a run that goes on later knows its best version

    def save(self, progress: Progress) -> None:
        """Save a checkpoint from which a resumed run starts with this step."""
        if self.checkpoints is None:
            return
        buffer = self.scheduler.buffer
        with self._timing("save_ckpt"):
            progress.ledger_bytes = buffer.ledger.save(progress.step)
            self.checkpoints.save(progress, buffer.state(self.scheduler.examples_in_flight))
            self.checkpoints.prune(self.policy.version, progress.step)

    async def collect(self, step: int) -> list[Group]:
        sampling_args = train_sampling_args(self.sampling, self.temperature(step))
        with self._timing("generate_completions"):
            async with self._validating(step, sampling_args):
                return await self.scheduler.collect(step, self.target, sampling_args)

    def prepare(self, groups: list[Group]) -> Batch:
        """Apply filters, assign advantages and convert the rollouts to samples."""
        own_beats().say("assigning advantages and building the batch")
        with self._timing("parallel_preprocess"):
            apply_filters(self.filters, [rollout for group in groups for rollout in group.rollouts])
            assign_advantages(groups, self.advantage)
            return build_batch(groups, needs_top=self.sampling.reported > 0)

    async def score(self, batch: Batch, step: int, teacher: Teachers) -> None:
        """Wait for the teacher's scores of the batch, which it began when each group ended."""
        own_beats().say(f"step {step}: waiting for the teacher's log-probabilities")
        with self._timing("teacher_logprobs"):
            await teacher.finish(batch)

    async def send(self, batch: Batch, progress: Progress) -> None:
        own_beats().say(f"step {progress.step}: sending the batch")
        kept = self.rollout_log.choose(batch, progress.step)
        if self.free_servers is not None:
            await self.free_servers()
        # In a thread, so that a slow disk does not block the event loop and the rollouts in flight.
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.sending, self.sender.send, batch.message(progress.step))
        self.scheduler.buffer.ledger.trained((group.example.draw for group in batch.groups), progress.step)
        self.rollout_log.write_batch(progress.step, batch.groups, kept)
        tokens = count_tokens(sample for _, samples in batch.samples for sample in samples)
        progress.advance(tokens.total, len(batch.rollouts), len(batch.groups))
        self.empty.in_a_row = 0

    async def end_early(self, why: str, step: int, early_stop: EarlyStop) -> None:
        """Tell the trainer that it gets no batch of `step`, and record why."""
        early_stop.end(why)
        message = TrainingBatch(examples=[], step=step, early_end=why)
        await asyncio.get_running_loop().run_in_executor(self.sending, self.sender.send, message)

    def report(self, batch: Batch, progress: Progress) -> None:
        """Report the step that has just been sent."""
        step = progress.step - 1
        if self.early_stop is not None:
            self.early_stop.rewarded(reward_metrics(batch.groups)["reward/mean"])
        policy_times = self.policy.take_times()
        self.times.wait_for_ckpt, self.times.update_weights = policy_times.waiting_s, policy_times.updating_s
        status = StepStatus(
            step=step,
            policy_version=self.policy.version,
            groups_in_flight=self.scheduler.groups_in_flight,
            group_size=self.scheduler.limits.group_size,
            cancelled_groups=self.scheduler.take_cancelled(),
            temperature=self.temperature(step),
        )
        extra = {**self.scheduler.buffer.take_metrics(), **self.loop_metrics(), **self.validation}
        extra |= self.pool_metrics()
        self.validation = {}
        self.reporter.record(batch, progress, status, self.times, extra)
        self.times = StepTimes()

    def temperature(self, step: int) -> float:
        return temperature_at(self.sampling, step, self.max_steps)

    @asynccontextmanager
    async def _validating(self, step: int, sampling_args: dict[str, Any]) -> AsyncIterator[None]:
        """Run a validation concurrently with the block, if one is due."""
        if self.validator is None or not self.validator.due(step):
            yield
            return
        await self.policy.require(step)
        task = asyncio.create_task(self.validator.run(step, sampling_args, self.policy.version))
        try:
            yield
            self.validation = await task
        finally:
            task.cancel()

    @contextmanager
    def _timing(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            setattr(self.times, phase, getattr(self.times, phase) + time.perf_counter() - started)
