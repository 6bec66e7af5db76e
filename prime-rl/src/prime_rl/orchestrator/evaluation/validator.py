"""Validates the policy on held-out rows with the training setup, concurrently with the rollouts of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prime_rl.configs.orchestrator import ValConfig
from prime_rl.orchestrator.evaluation.scores import reward_error_share
from prime_rl.orchestrator.reports.metrics import reward_metrics
from prime_rl.orchestrator.rollouts.attempts import Attempt, Attemptable, ServerPool, run_attempts
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Group
from prime_rl.orchestrator.rollouts.sampling import seeded_for_group
from prime_rl.utils.logger import get_logger


@dataclass(frozen=True, slots=True)
class Validator:
    """Rolls out the same examples each time, so that validations differ only in the policy."""

    config: ValConfig
    environments: Mapping[str, Attemptable]
    examples: list[ExampleRef]
    pool: ServerPool
    max_concurrent: int
    """Maximum number of concurrent groups."""

    def due(self, step: int) -> bool:
        return step % self.config.interval == 0

    async def run(self, step: int, sampling_args: dict[str, Any], version: int) -> dict[str, float]:
        """Returns `val_reward/*`, `val_failed/count` and, with several environments, `val_batch/*`.

        Failed rollouts are counted but not scored.
        """
        size = self.config.rollouts_per_example
        attempts = [
            Attempt(self.environments[example.env], example, seeded_for_group(sampling_args, example), size)
            for example in self.examples
        ]
        outcomes = await run_attempts(attempts, self.pool, version, self.max_concurrent)
        failed = sum(outcome.failed for outcome in outcomes)
        if failed:
            reason = next(outcome.reason for outcome in outcomes if outcome.reason)
            get_logger().warning(f"Step {step}: {failed} validation rollouts failed; first error: {reason}")
        groups = [Group(outcome.rollouts) for outcome in outcomes if outcome.rollouts]
        return {"val_failed/count": failed, **validation_metrics(groups)}


def validation_metrics(groups: list[Group]) -> dict[str, float]:
    """Reward metrics with the prefix `val_`."""
    if not groups:
        return {}
    envs = {rollout.example.env for group in groups for rollout in group.rollouts}
    shares = {f"batch/{env}" for env in envs}
    named = {
        f"val_{name}": value
        for name, value in reward_metrics(groups).items()
        if name.startswith("reward/") or name in shares
    }
    return {**named, "val_reward/errors": reward_error_share([each for group in groups for each in group.rollouts])}
