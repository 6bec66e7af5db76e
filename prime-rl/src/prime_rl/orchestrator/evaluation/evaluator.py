"""Evaluation during training: all rollouts of one evaluation come from one policy version."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from prime_rl.configs.orchestrator import EvalConfig, EvalEnvConfig
from prime_rl.monitors import Monitor
from prime_rl.orchestrator.env_servers.environments import Environment
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.evaluation.pass_at_k import pass_at_powers
from prime_rl.orchestrator.reports.rollout_log import RolloutLog
from prime_rl.orchestrator.rollouts.attempts import Attempt, Outcome, ServerPool, run_attempts
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.orchestrator.rollouts.sampling import eval_sampling_args
from prime_rl.orchestrator.scheduling.scheduler import Scheduler
from prime_rl.orchestrator.servers.policy import Policy
from prime_rl.utils.logger import SUCCESS, get_logger


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One environment's part of an evaluation."""

    name: str
    environment: Environment
    rows: range
    attempts: int
    """Rollouts of each row."""
    max_retries: int

    @classmethod
    def of(cls, config: EvalEnvConfig, defaults: EvalConfig, environment: Environment) -> EvalSet:
        """Raises EnvironmentFault when `skip_first` leaves nothing."""
        if config.skip_first >= len(environment):
            raise EnvironmentFault(
                f"orchestrator.eval.env: skip_first = {config.skip_first} leaves none of the "
                f"{len(environment)} rows of {environment.name!r}"
            )
        count = config.num_examples or defaults.num_examples
        end = len(environment) if count < 0 else min(config.skip_first + count, len(environment))
        attempts = config.rollouts_per_example or defaults.rollouts_per_example
        return cls(environment.name, environment, range(config.skip_first, end), attempts, config.max_retries)


@dataclass(slots=True)
class EvalSchedule:
    """When an evaluation is due.

    The policy version may jump, so what counts is that it crossed a multiple of `interval` since the last evaluation.
    """

    interval: int
    last: int
    """Version of the last evaluation; -1 before the first."""

    @classmethod
    def starting(cls, config: EvalConfig, resumed_version: int) -> EvalSchedule:
        if resumed_version:
            return cls(config.interval, resumed_version if config.skip_eval_on_resume else resumed_version - 1)
        return cls(config.interval, -1 if config.eval_base_model else 0)

    def due(self, version: int) -> bool:
        return version // self.interval > self.last // self.interval


@dataclass(slots=True)
class Evaluator:
    """Evaluates the policy between two batches. No training rollout starts meanwhile; those in flight go on."""

    config: EvalConfig
    sets: Sequence[EvalSet]
    schedule: EvalSchedule
    policy: Policy
    pool: ServerPool
    monitor: Monitor
    rollout_log: RolloutLog
    at_once: int
    """Rollouts at once, over all environments."""

    async def run_if_due(self, step: int, scheduler: Scheduler) -> None:
        """Evaluate before the batch of `step` is collected, if the policy has crossed an interval."""
        # The batch waits for this version anyway. At async level 0 it makes every interval exact.
        await self.policy.require(step)
        if not self.schedule.due(self.policy.version):
            return
        if self.config.cancel_inflight_rollouts_on_eval:
            await scheduler.interrupt()
        await self._run(step)

    async def finish(self, version: int) -> None:
        """Evaluate the last version, once the trainer has published it."""
        await self.policy.require_version(version)
        if self.policy.version > self.schedule.last:
            await self._run(version)

    async def _run(self, step: int) -> None:
        attempts = [attempt for each in self.sets for attempt in self._attempts(each)]
        async with self.policy.pinned() as version:
            self.schedule.last = version
            started_s = time.perf_counter()
            outcomes = await run_attempts(attempts, self.pool, version, self.at_once)
        await asyncio.to_thread(self.rollout_log.write_evaluation, version, outcomes)
        rest = iter(outcomes)
        metrics: dict[str, float] = {"progress/ckpt_step": version}
        for each in self.sets:
            of_set = list(islice(rest, len(each.rows) * each.attempts))
            of_env = eval_metrics(of_set, each.attempts)
            of_env["time"] = max((outcome.ended_s for outcome in of_set), default=started_s) - started_s
            _tell(each.name, version, of_env, of_set)
            metrics |= {f"eval/{each.name}/{name}": value for name, value in of_env.items()}
        self.monitor.log(metrics, step)

    def _attempts(self, part: EvalSet) -> Iterator[Attempt]:
        # Row by row, not attempt by attempt: servers find the prompt of a row in their cache.
        arguments = [eval_sampling_args(self.config.sampling, number) for number in range(part.attempts)]
        for row in part.rows:
            example = ExampleRef(part.name, row)
            for sampling_args in arguments:
                yield Attempt(part.environment, example, sampling_args, max_retries=part.max_retries)


def eval_metrics(outcomes: Sequence[Outcome], attempts: int) -> dict[str, float]:
    """What is reported of one environment, over the rollouts that did not fail; `failed/*` counts the others.

    `pass@k` is there when every reward is 0 or 1.
    """
    rollouts = [rollout for outcome in outcomes for rollout in outcome.rollouts]
    failed = sum(outcome.failed for outcome in outcomes)
    metrics = {"failed/count": failed, "failed/mean": failed / max(len(rollouts) + failed, 1)}
    if not rollouts:
        return metrics
    rewards: dict[ExampleRef, list[float]] = {}
    for rollout in rollouts:
        rewards.setdefault(rollout.example, []).append(rollout.reward)
    lengths = [rollout.completion_tokens for rollout in rollouts]
    silent = sum(not has_response(rollout) for rollout in rollouts)
    return {
        f"avg@{attempts}": statistics.fmean(rollout.reward for rollout in rollouts),
        "no_response/mean": silent / len(rollouts),
        "no_response/count": silent,
        "completion_len/mean": statistics.fmean(lengths),
        "completion_len/max": max(lengths),
        "completion_len/min": min(lengths),
        "is_truncated/mean": statistics.fmean(rollout.is_truncated for rollout in rollouts),
        **{f"pass@{k}": value for k, value in pass_at_powers(rewards.values()).items()},
        **metrics,
    }


def has_response(rollout: Rollout) -> bool:
    """Whether the policy said or called anything."""
    if not isinstance(rollout.completion, list):
        return bool(rollout.completion)
    return any(
        message.get("content") or message.get("tool_calls")
        for message in rollout.completion
        if message.get("role") == "assistant"
    )


def _tell(name: str, version: int, metrics: Mapping[str, float], outcomes: Sequence[Outcome]) -> None:
    if metrics["failed/count"]:
        reason = next(outcome.reason for outcome in outcomes if outcome.reason)
        get_logger().warning(
            f"Evaluation on {name!r}: {metrics['failed/count']} rollouts failed and are left out of its scores; "
            f"one of them: {reason}"
        )
    scores = [f"{key}: {value:.4f}" for key, value in metrics.items() if key.startswith(("avg@", "pass@"))]
    shown = " | ".join([*(scores or ["no rollout succeeded"]), f"Time: {metrics['time']:.2f}s"])
    get_logger().log(SUCCESS, f"Evaluation on {name!r} | Version: {version} | {shown}")
