"""Rollouts that are looked at and not trained on: a few at a time, and a failure is a result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.orchestrator.servers.server import InferenceServer


class Attemptable(Protocol):
    """An environment, as needed here."""

    async def attempt(
        self,
        example: ExampleRef,
        size: int,
        server: InferenceServer,
        sampling_args: dict[str, Any],
        version: int,
        max_retries: int = 0,
    ) -> list[Rollout]: ...


class ServerPool(Protocol):
    """The inference servers, as needed here."""

    def least_loaded(self) -> InferenceServer: ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """One group of rollouts to make."""

    environment: Attemptable
    example: ExampleRef
    sampling_args: dict[str, Any]
    size: int = 1
    max_retries: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an attempt."""

    example: ExampleRef
    rollouts: list[Rollout]
    """Those that ended without an error."""
    failed: int = 0
    """Those that did not: they have no score, rather than one of 0."""
    reason: str | None = None
    """Why one of them failed."""
    ended_s: float = field(default_factory=time.perf_counter)
    """By `time.perf_counter`."""


async def run_attempts(attempts: Sequence[Attempt], pool: ServerPool, version: int, at_once: int) -> list[Outcome]:
    """Make all attempts, so many `at_once`; their outcomes in the same order."""
    outcomes: list[Outcome | None] = [None] * len(attempts)
    waiting = iter(enumerate(attempts))
    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, len(attempts))):
            group.create_task(_work(waiting, pool, version, outcomes))
    return [outcome for outcome in outcomes if outcome is not None]


async def _work(
    waiting: Iterator[tuple[int, Attempt]], pool: ServerPool, version: int, outcomes: list[Outcome | None]
) -> None:
    for index, attempt in waiting:
        server = pool.least_loaded()
        server.groups_in_flight += 1
        try:
            outcomes[index] = await _outcome(attempt, server, version)
        finally:
            server.groups_in_flight -= 1


async def _outcome(attempt: Attempt, server: InferenceServer, version: int) -> Outcome:
    try:
        rollouts = await attempt.environment.attempt(
            attempt.example, attempt.size, server, attempt.sampling_args, version, attempt.max_retries
        )
    except Exception as error:  # noqa: BLE001 - an environment's own code may raise anything, and the run goes on
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Outcome(attempt.example, [], attempt.size, reason)
    good = [rollout for rollout in rollouts if rollout.error is None]
    reasons = [rollout.error_detail or rollout.error for rollout in rollouts if rollout.error]
    return Outcome(attempt.example, good, len(reasons), reasons[-1] if reasons else None)
