"""Runs rollouts that are scored and not trained on, a limited number at a time, and returns failures as results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.orchestrator.servers.server import InferenceServer, unless
from prime_rl.run.process import own_beats
from prime_rl.utils.logger import count_of


class EvalEnvironment(Protocol):
    """The part of an environment that evaluations use."""

    async def evaluate(
        self,
        example: ExampleRef,
        size: int,
        server: InferenceServer,
        sampling_args: dict[str, Any],
        version: int,
        max_retries: int = 0,
    ) -> list[Rollout]: ...


class ServerPool(Protocol):
    """The part of the server pool that evaluations use."""

    def least_loaded(self) -> InferenceServer | None: ...

    def missing(self) -> str: ...

    async def wait_for_server(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EvalGroup:
    """One group of rollouts to run."""

    environment: EvalEnvironment
    example: ExampleRef
    sampling_args: dict[str, Any]
    size: int = 1
    max_retries: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a group."""

    example: ExampleRef
    rollouts: list[Rollout]
    """Rollouts that ended without an error."""
    failed: int = 0
    """Number of rollouts that ended with an error. They have no score, rather than a score of 0."""
    reason: str | None = None
    """Error of the last rollout that failed."""
    ended_s: float = field(default_factory=time.perf_counter)
    """Time of the end, by `time.perf_counter`."""


async def run_eval_groups(
    groups: Sequence[EvalGroup], pool: ServerPool, version: int, max_concurrent: int
) -> list[Outcome]:
    """Run all groups, at most `max_concurrent` at a time; returns their outcomes in the same order.

    Raises:
        EnvironmentFault: an environment cannot be used any more.
    """
    outcomes: list[Outcome | None] = [None] * len(groups)
    waiting = iter(enumerate(groups))
    own_beats().say(f"evaluating version {version}: {count_of('rollout', len(groups))}")
    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(max_concurrent, len(groups))):
                workers.create_task(_work(waiting, pool, version, outcomes))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0]  # noqa: B904 - keep the error's own cause, not the group
    return [outcome for outcome in outcomes if outcome is not None]


async def _work(
    waiting: Iterator[tuple[int, EvalGroup]], pool: ServerPool, version: int, outcomes: list[Outcome | None]
) -> None:
    for index, group in waiting:
        while outcomes[index] is None:
            server = await _server(pool, version)
            outcomes[index] = await _outcome_unless_lost(group, server, version)
        done = sum(outcome is not None for outcome in outcomes)
        own_beats().say(f"evaluating version {version}: {done} of {len(outcomes)} rollouts are done")


async def _server(pool: ServerPool, version: int) -> InferenceServer:
    while (server := pool.least_loaded()) is None:
        own_beats().say(f"evaluating version {version}: waiting for an inference server: {pool.missing()}", "inference")
        await pool.wait_for_server()
    return server


async def _outcome_unless_lost(group: EvalGroup, server: InferenceServer, version: int) -> Outcome | None:
    """The outcome of a group; None if the pool lost the server before the group succeeded."""
    server.groups_in_flight += 1
    try:
        outcome = await unless(server.lost, _outcome(group, server, version))
    finally:
        server.groups_in_flight -= 1
    return None if outcome is not None and outcome.failed and server.lost.is_set() else outcome


async def _outcome(group: EvalGroup, server: InferenceServer, version: int) -> Outcome:
    try:
        rollouts = await group.environment.evaluate(
            group.example, group.size, server, group.sampling_args, version, group.max_retries
        )
    except EnvironmentFault:
        raise
    except Exception as error:  # noqa: BLE001 - environment code may raise anything, and the run continues
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Outcome(group.example, [], group.size, reason)
    good = [rollout for rollout in rollouts if rollout.error is None]
    reasons = [rollout.error_detail or rollout.error for rollout in rollouts if rollout.error]
    return Outcome(group.example, good, len(reasons), reasons[-1] if reasons else None)
