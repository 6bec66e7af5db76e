"""Keeps groups of rollouts in flight on the inference servers, and collects finished groups into batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prime_rl.orchestrator.batches.batch import BatchTarget
from prime_rl.orchestrator.errors import EnvironmentFault, TooManyFailures
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Group, Rollout
from prime_rl.orchestrator.rollouts.sampling import seeded_for_group
from prime_rl.orchestrator.scheduling.buffer import Buffer
from prime_rl.orchestrator.scheduling.staleness import Staleness
from prime_rl.orchestrator.servers.policy import Policy
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.orchestrator.workers.failures import reason_of
from prime_rl.run.process import own_beats
from prime_rl.transport.messages import TrainingSample
from prime_rl.utils.logger import count_of, get_logger

Task = asyncio.Task[list[Rollout]]
ScoredSamples = asyncio.Task[list[list[TrainingSample]]]
MAX_ATTEMPTS = 3
"""Number of times that an example is rolled out, including the first."""
MIN_FAILURES_IN_A_ROW = 8
WAIT_LOG_INTERVAL_S = 60.0


class GroupRunner(Protocol):
    """The part of an environment that the scheduler uses."""

    async def run_group(
        self, example: ExampleRef, size: int, server: InferenceServer, sampling_args: dict[str, Any], version: int
    ) -> list[Rollout]: ...

    def waits_for(self) -> str: ...


class ServerPool(Protocol):
    """The part of the server pool that the scheduler uses."""

    def least_loaded(self) -> InferenceServer | None: ...

    def missing(self) -> str: ...


class SampleScorer(Protocol):
    """The part of a teacher that the scheduler uses."""

    def begin(self, rollouts: Sequence[Rollout]) -> ScoredSamples: ...


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits on the groups in flight."""

    group_size: int
    groups_in_flight: int
    max_off_policy_steps: int
    """A group in flight is cancelled after more weight updates than this."""
    groups_per_minute: int | None = None
    staleness: Staleness | None = None
    """Bounds how many groups start. None if batches are counted in tokens: their number of groups is unknown."""
    ending_s: float = 10.0
    """Longest wait for cancelled groups to end, in seconds."""

    @property
    def max_failures_in_a_row(self) -> int:
        """Number of failed groups in a row that ends the run: twice the groups in flight."""
        return max(MIN_FAILURES_IN_A_ROW, 2 * self.groups_in_flight)


@dataclass(slots=True)
class InFlightGroup:
    """A group that is running, or has finished and not been collected."""

    example: ExampleRef
    server: InferenceServer
    attempt: int
    version: int
    """Policy version when the group started."""
    off_policy_level: int = 0
    """Number of weight updates since the group started."""
    has_started: bool = False
    """False while the group waits for `groups_per_minute`."""
    scored_samples: ScoredSamples | None = None
    """Set when the group ends, in a run with a teacher."""


class Scheduler:
    """Keeps groups of rollouts in flight across batches. Groups that finish after a batch is full go into the next.

    Each example is trained on, rejected by the buffer, or given up with a warning after `MAX_ATTEMPTS`; until then it
    is in flight or waits for a retry.
    """

    def __init__(
        self,
        environments: Mapping[str, GroupRunner],
        buffer: Buffer,
        pool: ServerPool,
        policy: Policy,
        limits: SchedulerLimits,
        teacher: SampleScorer | None = None,
    ) -> None:
        self.environments = environments
        self.buffer = buffer
        self.pool = pool
        self.policy = policy
        self.limits = limits
        self.teacher = teacher
        self.cancelled_groups = 0
        self._in_flight: dict[Task, InFlightGroup] = {}
        self._finished: dict[Task, None] = {}
        """Tasks in flight that have ended, in order of their end. A dict: a list of thousands is slow to search."""
        self._changed = asyncio.Event()
        """Set when a task ends and when a version is announced: a group may now be collected or started."""
        self._retries: deque[tuple[ExampleRef, int]] = deque()
        self._failures_in_a_row = 0
        self._rejections_in_a_row = 0
        rate = limits.groups_per_minute
        self._limiter = RateLimit(rate) if rate else None
        policy.listeners.append(self.on_new_version)

    @property
    def examples_in_flight(self) -> list[ExampleRef]:
        return [group.example for group in self._in_flight.values()] + [example for example, _ in self._retries]

    @property
    def groups_in_flight(self) -> int:
        """Groups that are running, or have finished and not been collected."""
        return len(self._in_flight)

    async def collect(self, step: int, target: BatchTarget, sampling_args: dict[str, Any]) -> list[Group]:
        """Wait for the groups of one batch. Groups that start from now on use `sampling_args`.

        With bounded staleness, waits for running groups that would be too old for the next batch.

        Raises:
            TooManyFailures: `max_failures_in_a_row` groups failed in a row.
            OrchestratorError: the buffer has no example left.
        """
        await self.policy.require(step)
        groups: list[Group] = []
        left = target.size
        while left > 0:
            self._changed.clear()
            self._refill(sampling_args, step, len(groups))
            task = self._next_finished(step, len(groups))
            if task is None:
                is_empty = self.pool.least_loaded() is None
                own_beats().say(f"step {step}: {self._state()}", "inference" if is_empty else None)
                await self._wait(step)
                continue
            own_beats().tick()
            group = self._take_result(task)
            if group is not None and self._accept(group, step):
                groups.append(group)
                left -= target.count(group)
        return groups

    def on_new_version(self, version: int) -> None:
        """Increment the off-policy level of every group in flight, and retry groups above `max_off_policy_steps`.

        A running group uses up an attempt. A finished one does not, because it was not slow.
        """
        limit = self.limits.max_off_policy_steps
        for group in self._in_flight.values():
            group.off_policy_level += group.has_started
        old = {task: group for task, group in self._in_flight.items() if group.off_policy_level > limit}
        for task, group in old.items():
            self._cancel(task)
            reason = f"more than {limit} weight updates while it ran"
            if task.done():
                self._queue(group.example, group.attempt, reason)
            elif not self._retry(group, reason):
                get_logger().warning(
                    f"Gave up row {group.example.row} of environment {group.example.env!r}: cancelled {MAX_ATTEMPTS} "
                    f"times after more than {limit} weight updates; raise orchestrator.max_off_policy_steps"
                )
        self.cancelled_groups += len(old)
        self._changed.set()

    def take_cancelled(self) -> int:
        """Number of groups cancelled by `on_new_version` since the last call."""
        cancelled, self.cancelled_groups = self.cancelled_groups, 0
        return cancelled

    async def interrupt(self) -> None:
        """Cancel all running groups. Their examples are retried before new ones are sampled."""
        await self._ended(self._requeue(lambda group: True, "an evaluation"))

    def follow(self, pool: InferencePool) -> None:
        """Move groups away from servers that `pool` loses, and start groups on those that join it."""
        pool.on_lost.append(self.on_server_lost)
        pool.on_joined.append(self.on_server_joined)

    def on_server_lost(self, server: InferenceServer) -> None:
        """Cancel the server's groups and retry them on other servers. This does not count as an attempt."""
        self._requeue(lambda group: group.server is server, "its server was lost")

    def on_server_joined(self, server: InferenceServer) -> None:
        """Start groups on the new server."""
        self._changed.set()

    async def close(self) -> None:
        """Cancel all groups in flight, and wait until they have ended, at most `ending_s`."""
        tasks = list(self._in_flight)
        for task in tasks:
            task.cancel()
        await self._ended(tasks)
        self._in_flight.clear()
        self._finished.clear()

    async def _ended(self, cancelled: Sequence[Task]) -> None:
        """Wait until cancelled groups have ended, at most `ending_s`: environment code may catch the cancellation."""
        if not cancelled:
            return
        ended, running = await asyncio.wait(cancelled, timeout=self.limits.ending_s)
        await asyncio.gather(*ended, return_exceptions=True)  # retrieves their errors, or asyncio would log them
        if running:
            get_logger().warning(
                f"{count_of('group', len(running))} did not end within {self.limits.ending_s:g} s of the cancellation, "
                "which the environment's code catches; they are abandoned"
            )

    def _requeue(self, matches: Callable[[InFlightGroup], bool], reason: str) -> list[Task]:
        """Cancel the running groups that match, and queue their examples for a retry."""
        running = {task: group for task, group in self._in_flight.items() if not task.done() and matches(group)}
        for task, group in running.items():
            self._cancel(task)
            self._queue(group.example, group.attempt, reason)
        return list(running)

    def _refill(self, sampling_args: dict[str, Any], step: int, collected: int) -> None:
        for _ in range(self._startable(step, collected)):
            server = self.pool.least_loaded()
            if server is None:
                return
            example, attempt = self._retries.popleft() if self._retries else (self.buffer.sample(), 1)
            group = InFlightGroup(example, server, attempt, self.policy.version)
            server.groups_in_flight += 1
            task = asyncio.create_task(self._run(group, sampling_args))
            self._in_flight[task] = group
            task.add_done_callback(self._on_end)

    def _startable(self, step: int, collected: int) -> int:
        """Number of groups that may start now."""
        staleness, in_flight = self.limits.staleness, len(self._in_flight)
        usable = None if staleness is None else staleness.usable(step, self.policy.version)
        if usable is None:
            return self.limits.groups_in_flight - in_flight
        # Finished groups that wait for a later batch need no server; `usable` limits how many they are.
        running = in_flight - len(self._finished)
        return min(self.limits.groups_in_flight - running, usable - collected - in_flight)

    def _next_finished(self, step: int, collected: int) -> Task | None:
        """The first finished task that the batch of `step` may collect; None if there is none.

        Failed tasks are always collected: they take no place in the batch.
        """
        staleness, newest = self.limits.staleness, None
        if self._finished and staleness is not None and staleness.max_staleness is not None:
            versions = [group.version for group in self._in_flight.values()]
            newest = staleness.newest_collectable(step, collected, versions)
        for task in self._finished:
            has_failed = task.cancelled() or task.exception() is not None
            if has_failed or newest is None or self._in_flight[task].version <= newest:
                return task
        return None

    async def _wait(self, step: int) -> None:
        """Wait until a group ends or a version arrives. Logs the reason for the wait every `WAIT_LOG_INTERVAL_S`."""
        try:
            # Not `wait_for`: in Python 3.11 it forgets a cancellation that comes together with the event.
            async with asyncio.timeout(WAIT_LOG_INTERVAL_S):
                await self._changed.wait()
        except TimeoutError:
            get_logger().info(f"Step {step}: {self._state()}")

    def _state(self) -> str:
        """Rejections since the last report, and the reason for the wait."""
        return "; ".join(words for words in (self.buffer.rejections(), self._waiting_for()) if words)

    def _waiting_for(self) -> str:
        oldest = next((group for task, group in self._in_flight.items() if not task.done()), None)
        if oldest is None and self.pool.least_loaded() is None:
            return f"waiting for an inference server: {self.pool.missing()}"
        if oldest is None:  # the last one has just ended
            return "waiting to start groups"
        held = 0 if self._limiter is None else sum(not group.has_started for group in self._in_flight.values())
        running = len(self._in_flight) - len(self._finished) - held
        limit = f"{count_of('group', held)} may not start yet: tasks_per_minute = {self.limits.groups_per_minute}"
        if not running:
            return limit
        # The groups that may not start yet come after those that did.
        name = oldest.example.env
        what = self.environments[name].waits_for()
        return (
            f"waiting for {count_of('group', running)}; the oldest started with version {oldest.version}: "
            f"environment {name!r}, row {oldest.example.row}{what and f', which waits {what}'}"
            f"{f'; {limit}' if held else ''}"
        )

    async def _run(self, group: InFlightGroup, sampling_args: dict[str, Any]) -> list[Rollout]:
        if self._limiter is not None:
            await self._limiter.acquire()
            self._changed.set()  # fewer groups wait for the limit
        group.version, group.has_started = self.policy.version, True
        environment = self.environments[group.example.env]
        sampling_args = seeded_for_group(sampling_args, group.example)
        rollouts = await environment.run_group(
            group.example, self.limits.group_size, group.server, sampling_args, group.version
        )
        if self.teacher is not None:
            # Beside the rollouts that still run: the batch waits only for what is left when it is full.
            group.scored_samples = self.teacher.begin(rollouts)
        return rollouts

    def _on_end(self, task: Task) -> None:
        if task in self._in_flight:
            self._finished[task] = None
        elif not task.cancelled():
            task.exception()  # retrieved, or asyncio would log it
        self._changed.set()

    def _cancel(self, task: Task) -> None:
        _forget_scores(self._release(task))
        task.cancel()

    def _release(self, task: Task) -> InFlightGroup:
        self._finished.pop(task, None)
        group = self._in_flight.pop(task)
        group.server.groups_in_flight -= 1
        return group

    def _take_result(self, task: Task) -> Group | None:
        """Return the group of a finished task; None if the task failed."""
        in_flight = self._release(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._handle_failure(in_flight, error)
            return None
        self._failures_in_a_row = 0
        group = Group(task.result(), in_flight.off_policy_level, in_flight.scored_samples)
        self.buffer.ledger.finished(in_flight.example.draw, group.mean_reward)
        return group

    def _handle_failure(self, group: InFlightGroup, error: BaseException) -> None:
        if isinstance(error, EnvironmentFault):  # the next group would fail as well
            raise error
        if group.server.lost.is_set():
            self._queue(group.example, group.attempt, "its server was lost")
            return
        self._failures_in_a_row += 1
        row = f"environment {group.example.env!r}, row {group.example.row}"
        reason = f"{row}: {type(error).__name__}: {' '.join(str(error).split())}"
        if self._failures_in_a_row >= self.limits.max_failures_in_a_row:
            raise TooManyFailures(
                f"{self._failures_in_a_row} groups of rollouts failed in a row; the last one: {reason}"
            ) from error
        outcome = "will retry" if self._retry(group, reason_of(error)) else "giving up"
        get_logger().warning(f"A group failed (attempt {group.attempt} of {MAX_ATTEMPTS}, {outcome}), {reason}")

    def _retry(self, group: InFlightGroup, reason: str) -> bool:
        """Queue the example for another attempt; False if this was the last one."""
        if group.attempt == MAX_ATTEMPTS:
            self.buffer.ledger.dropped(group.example.draw, f"{reason}, {MAX_ATTEMPTS} times")
            return False
        self._queue(group.example, group.attempt + 1, reason)
        return True

    def _queue(self, example: ExampleRef, attempt: int, reason: str) -> None:
        self._retries.append((example, attempt))
        self.buffer.ledger.requeued(example.draw, reason)

    def _accept(self, group: Group, step: int) -> bool:
        if self.buffer.accepts(group):
            self._rejections_in_a_row = 0
            return True
        _forget_scores(group)
        self._rejections_in_a_row += 1
        if self._rejections_in_a_row % (10 * self.limits.groups_in_flight) == 0:
            get_logger().warning(f"Step {step}: {self.buffer.rejections()}: {self.buffer.advice()}")
        return False


def _forget_scores(group: InFlightGroup | Group) -> None:
    if group.scored_samples is not None:
        group.scored_samples.cancel()


class RateLimit:
    """Allows at most `most` starts within any `period_s` seconds, first come, first served."""

    def __init__(self, most: int, period_s: float = 60.0) -> None:
        self.most = most
        self._period_s = period_s
        self._starts: deque[float] = deque()
        """Times of the starts in the last period, on the event loop's clock."""
        self._turn = asyncio.Lock()

    async def acquire(self) -> None:
        """Wait until one more may start, and count it. A cancelled wait is not counted."""
        clock = asyncio.get_running_loop().time
        async with self._turn:
            if len(self._starts) >= self.most:
                await asyncio.sleep(self._starts[-self.most] + self._period_s - clock())
            self._starts.append(clock())
            while self._starts[0] <= self._starts[-1] - self._period_s:
                self._starts.popleft()
