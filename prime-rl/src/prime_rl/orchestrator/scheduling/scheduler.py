"""Schedules rollout groups on the inference servers, and collects finished groups into batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from aiolimiter import AsyncLimiter

from prime_rl.orchestrator.batches.batch import BatchTarget
from prime_rl.orchestrator.errors import EnvironmentFault, TooManyFailures
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Group, Rollout
from prime_rl.orchestrator.scheduling.buffer import Buffer
from prime_rl.orchestrator.servers.policy import Policy
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.utils.logger import get_logger

MAX_ATTEMPTS = 3
"""Number of attempts at an example, including the first."""
MIN_FAILURES_IN_A_ROW = 8


class GroupRunner(Protocol):
    """The part of an environment that the scheduler uses."""

    async def run_group(
        self, example: ExampleRef, size: int, server: InferenceServer, sampling_args: dict[str, Any], version: int
    ) -> list[Rollout]: ...


class ServerPool(Protocol):
    """The part of the server pool that the scheduler uses."""

    def least_loaded(self) -> InferenceServer: ...


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits on the groups in flight."""

    group_size: int
    groups_in_flight: int
    max_off_policy_steps: int
    """A group in flight is cancelled after more weight updates than this."""
    groups_per_minute: int | None = None

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
    off_policy_level: int = 0
    """Number of weight updates since the group started."""


class Scheduler:
    """Keeps groups of rollouts in flight across batches. Groups that finish after a batch is full go into the next."""

    def __init__(
        self,
        environments: Mapping[str, GroupRunner],
        buffer: Buffer,
        pool: ServerPool,
        policy: Policy,
        limits: SchedulerLimits,
    ) -> None:
        self.environments = environments
        self.buffer = buffer
        self.pool = pool
        self.policy = policy
        self.limits = limits
        self.cancelled_groups = 0
        self._in_flight: dict[asyncio.Task[list[Rollout]], InFlightGroup] = {}
        self._finished: asyncio.Queue[asyncio.Task[list[Rollout]]] = asyncio.Queue()
        self._retries: deque[tuple[ExampleRef, int]] = deque()
        self._failures_in_a_row = 0
        self._rejections_in_a_row = 0
        rate = limits.groups_per_minute
        self._limiter = AsyncLimiter(rate, 60.0) if rate else None
        policy.listeners.append(self.on_new_version)

    @property
    def examples_in_flight(self) -> list[ExampleRef]:
        return [group.example for group in self._in_flight.values()] + [example for example, _ in self._retries]

    @property
    def groups_in_flight(self) -> int:
        return len(self._in_flight)

    async def collect(
        self, step: int, target: BatchTarget, sampling_args: dict[str, Any], usable_groups: int | None = None
    ) -> list[Group]:
        """Wait for the groups of one batch. Groups that start from now on use `sampling_args`.

        Args:
            usable_groups: Number of groups that the rest of the run can train on; no more are started. None if unknown.

        Raises:
            TooManyFailures: `max_failures_in_a_row` groups failed in a row.
            NothingToTrain: the buffer has no example left.
        """
        await self.policy.require(step)
        groups: list[Group] = []
        while not target.reached(groups):
            self._refill(sampling_args, None if usable_groups is None else usable_groups - len(groups))
            group = self._take_result(await self._finished.get())
            if group is not None and self._accept(group):
                groups.append(group)
        return groups

    def on_new_version(self, version: int) -> None:
        """Increment the off-policy level of every group in flight, and cancel groups above `max_off_policy_steps`."""
        for task, group in list(self._in_flight.items()):
            group.off_policy_level += 1
            if group.off_policy_level > self.limits.max_off_policy_steps:
                self._release(task)
                task.cancel()
                self.cancelled_groups += 1

    def take_cancelled(self) -> int:
        """Number of groups cancelled by `on_new_version` since the last call."""
        cancelled, self.cancelled_groups = self.cancelled_groups, 0
        return cancelled

    async def interrupt(self) -> None:
        """Cancel all running groups. Their examples are retried before new ones are sampled."""
        await asyncio.gather(*self._requeue(lambda group: True), return_exceptions=True)

    def on_server_lost(self, server: InferenceServer) -> None:
        """Cancel the server's groups and retry them on other servers. This does not count as an attempt."""
        self._requeue(lambda group: group.server is server)

    async def close(self) -> None:
        """Cancel all groups in flight, and wait until their tasks have ended."""
        tasks = list(self._in_flight)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._in_flight.clear()

    def _requeue(self, matches: Callable[[InFlightGroup], bool]) -> list[asyncio.Task[list[Rollout]]]:
        """Cancel the running groups that match, and queue their examples for a retry."""
        running = {task: group for task, group in self._in_flight.items() if not task.done() and matches(group)}
        for task, group in running.items():
            self._release(task)
            task.cancel()
            self._retries.append((group.example, group.attempt))
        return list(running)

    def _refill(self, sampling_args: dict[str, Any], usable: int | None) -> None:
        capacity = self.limits.groups_in_flight if usable is None else min(self.limits.groups_in_flight, usable)
        while len(self._in_flight) < capacity:
            example, attempt = self._retries.popleft() if self._retries else (self.buffer.sample(), 1)
            group = InFlightGroup(example, self.pool.least_loaded(), attempt)
            group.server.groups_in_flight += 1
            task = asyncio.create_task(self._run(group, sampling_args))
            self._in_flight[task] = group
            task.add_done_callback(self._finished.put_nowait)

    async def _run(self, group: InFlightGroup, sampling_args: dict[str, Any]) -> list[Rollout]:
        if self._limiter is not None:
            await self._limiter.acquire()
        environment = self.environments[group.example.env]
        return await environment.run_group(
            group.example, self.limits.group_size, group.server, sampling_args, self.policy.version
        )

    def _release(self, task: asyncio.Task[list[Rollout]]) -> InFlightGroup | None:
        group = self._in_flight.pop(task, None)
        if group is not None:
            group.server.groups_in_flight -= 1
        return group

    def _take_result(self, task: asyncio.Task[list[Rollout]]) -> Group | None:
        """Return the group of a finished task; None if the task failed or was cancelled."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        in_flight = self._release(task)
        if in_flight is None:
            return None
        if error is not None:
            self._handle_failure(in_flight, error)
            return None
        self._failures_in_a_row = 0
        return Group(task.result(), in_flight.off_policy_level)

    def _handle_failure(self, group: InFlightGroup, error: BaseException) -> None:
        if isinstance(error, EnvironmentFault):  # the next group would fail as well
            raise error
        self._failures_in_a_row += 1
        reason = f"environment {group.example.env!r}: {type(error).__name__}: {' '.join(str(error).split())}"
        if self._failures_in_a_row >= self.limits.max_failures_in_a_row:
            raise TooManyFailures(
                f"{self._failures_in_a_row} groups of rollouts failed in a row; the last one: {reason}"
            ) from error
        if group.attempt < MAX_ATTEMPTS:
            self._retries.append((group.example, group.attempt + 1))
        outcome = "will retry" if group.attempt < MAX_ATTEMPTS else "giving up"
        get_logger().warning(f"A group failed (attempt {group.attempt} of {MAX_ATTEMPTS}, {outcome}), {reason}")

    def _accept(self, group: Group) -> bool:
        if self.buffer.accepts(group):
            self._rejections_in_a_row = 0
            return True
        self._rejections_in_a_row += 1
        if self._rejections_in_a_row % (10 * self.limits.groups_in_flight) == 0:
            get_logger().warning(
                f"orchestrator.buffer rejected {self._rejections_in_a_row} groups in a row: "
                "the rewards of each group are all equal, or all 0 or 1"
            )
        return False
