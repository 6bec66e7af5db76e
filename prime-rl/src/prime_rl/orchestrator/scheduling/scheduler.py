"""Keeps groups of rollouts in flight, across batches, and collects them into batches."""

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
"""How often an example is tried before its group is given up."""
MIN_FAILURES_IN_A_ROW = 8


class GroupRunner(Protocol):
    """An environment, as the scheduler needs it."""

    async def run_group(
        self, example: ExampleRef, size: int, server: InferenceServer, sampling_args: dict[str, Any], version: int
    ) -> list[Rollout]: ...


class ServerPool(Protocol):
    """The inference servers, as the scheduler needs them."""

    def least_loaded(self) -> InferenceServer: ...


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sizes of what is in flight."""

    group_size: int
    groups_in_flight: int
    max_off_policy_steps: int
    """A group that more weight updates than this happened to is cancelled."""
    groups_per_minute: int | None = None

    @property
    def failures_in_a_row(self) -> int:
        """So many failed groups without one success end the run: all that were in flight, twice over."""
        return max(MIN_FAILURES_IN_A_ROW, 2 * self.groups_in_flight)


@dataclass(slots=True)
class InFlight:
    """A group that runs, or is finished and not collected yet."""

    example: ExampleRef
    server: InferenceServer
    attempt: int
    off_policy_level: int = 0


class Scheduler:
    """Schedules groups of one example each. Groups that finish beyond a batch's target are kept for the next batch."""

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
        self._in_flight: dict[asyncio.Task[list[Rollout]], InFlight] = {}
        self._finished: asyncio.Queue[asyncio.Task[list[Rollout]]] = asyncio.Queue()
        self._retries: deque[tuple[ExampleRef, int]] = deque()
        self._failures_in_a_row = 0
        self._rejections_in_a_row = 0
        rate = limits.groups_per_minute
        self._limiter = AsyncLimiter(rate, 60.0) if rate else None
        policy.listeners.append(self.age)

    @property
    def examples_in_flight(self) -> list[ExampleRef]:
        return [group.example for group in self._in_flight.values()] + [example for example, _ in self._retries]

    @property
    def groups_in_flight(self) -> int:
        return len(self._in_flight)

    async def collect(
        self, step: int, target: BatchTarget, sampling_args: dict[str, Any], usable_groups: int | None = None
    ) -> list[Group]:
        """The groups of the batch of `step`. Groups scheduled from now on use `sampling_args`.

        `usable_groups` is how many groups the rest of the run can train on; no more than that are started.

        Raises:
            TooManyFailures: group after group fails.
        """
        await self.policy.require(step)
        groups: list[Group] = []
        while not target.reached(groups):
            self._refill(sampling_args, None if usable_groups is None else usable_groups - len(groups))
            group = self._settle(await self._finished.get())
            if group is not None and self._accept(group):
                groups.append(group)
        return groups

    def age(self, version: int) -> None:
        """Count a weight update for every group in flight, and cancel those that are too old now."""
        for task, group in list(self._in_flight.items()):
            group.off_policy_level += 1
            if group.off_policy_level > self.limits.max_off_policy_steps:
                self._release(task)
                task.cancel()
                self.cancelled_groups += 1

    def take_cancelled(self) -> int:
        """Groups cancelled for age since the last call."""
        cancelled, self.cancelled_groups = self.cancelled_groups, 0
        return cancelled

    async def interrupt(self) -> None:
        """Cancel the groups that still run; their examples come again first."""
        await asyncio.gather(*self._withdraw(lambda group: True), return_exceptions=True)

    def abandon(self, server: InferenceServer) -> None:
        """A server is lost: its groups run again elsewhere, which does not count as an attempt."""
        self._withdraw(lambda group: group.server is server)

    async def close(self) -> None:
        """Cancel everything in flight, and wait until it has ended."""
        tasks = list(self._in_flight)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._in_flight.clear()

    def _withdraw(self, chosen: Callable[[InFlight], bool]) -> list[asyncio.Task[list[Rollout]]]:
        running = {task: group for task, group in self._in_flight.items() if not task.done() and chosen(group)}
        for task, group in running.items():
            self._release(task)
            task.cancel()
            self._retries.append((group.example, group.attempt))
        return list(running)

    def _refill(self, sampling_args: dict[str, Any], usable: int | None) -> None:
        capacity = self.limits.groups_in_flight if usable is None else min(self.limits.groups_in_flight, usable)
        while len(self._in_flight) < capacity:
            example, attempt = self._retries.popleft() if self._retries else (self.buffer.sample(), 1)
            group = InFlight(example, self.pool.least_loaded(), attempt)
            group.server.groups_in_flight += 1
            task = asyncio.create_task(self._run(group, sampling_args))
            self._in_flight[task] = group
            task.add_done_callback(self._finished.put_nowait)

    async def _run(self, group: InFlight, sampling_args: dict[str, Any]) -> list[Rollout]:
        if self._limiter is not None:
            await self._limiter.acquire()
        environment = self.environments[group.example.env]
        return await environment.run_group(
            group.example, self.limits.group_size, group.server, sampling_args, self.policy.version
        )

    def _release(self, task: asyncio.Task[list[Rollout]]) -> InFlight | None:
        group = self._in_flight.pop(task, None)
        if group is not None:
            group.server.groups_in_flight -= 1
        return group

    def _settle(self, task: asyncio.Task[list[Rollout]]) -> Group | None:
        """The group that a finished task made; None if it failed, or was cancelled for age."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        in_flight = self._release(task)
        if in_flight is None:
            return None
        if error is not None:
            self._fail(in_flight, error)
            return None
        self._failures_in_a_row = 0
        return Group(task.result(), in_flight.off_policy_level)

    def _fail(self, group: InFlight, error: BaseException) -> None:
        if isinstance(error, EnvironmentFault):  # the next group would fail as well
            raise error
        self._failures_in_a_row += 1
        reason = f"environment {group.example.env!r}: {type(error).__name__}: {' '.join(str(error).split())}"
        if self._failures_in_a_row >= self.limits.failures_in_a_row:
            raise TooManyFailures(
                f"{self._failures_in_a_row} groups of rollouts failed and none succeeded; the last one: {reason}"
            ) from error
        if group.attempt < MAX_ATTEMPTS:
            self._retries.append((group.example, group.attempt + 1))
        outcome = "it runs again" if group.attempt < MAX_ATTEMPTS else "given up"
        get_logger().warning(f"A group failed (attempt {group.attempt} of {MAX_ATTEMPTS}, {outcome}), {reason}")

    def _accept(self, group: Group) -> bool:
        if self.buffer.accepts(group):
            self._rejections_in_a_row = 0
            return True
        self._rejections_in_a_row += 1
        if self._rejections_in_a_row % (10 * self.limits.groups_in_flight) == 0:
            get_logger().warning(
                f"orchestrator.buffer turned away {self._rejections_in_a_row} groups in a row: "
                "their rewards are all equal, or all 0 or 1"
            )
        return False
