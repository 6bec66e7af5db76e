"""Evaluates the policy during training: evaluations between batches, and validations beside them.

An evaluation pins one policy version and uses its own environments and sampling. A validation uses evaluation rows of
training environments and runs concurrently with the rollouts of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from prime_rl.configs.orchestrator import EvalConfig, EvalEnvConfig, ValConfig
from prime_rl.history.attempts import read_attempts
from prime_rl.history.metrics import MetricLog
from prime_rl.monitors import Monitor
from prime_rl.orchestrator.early_stop import EarlyStop
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.leaks import METRIC, Overlap
from prime_rl.orchestrator.reports.reporter import reward_metrics
from prime_rl.orchestrator.reports.rollout_log import RolloutLog
from prime_rl.orchestrator.rollouts.evaluation import EvalEnvironment, EvalGroup, Outcome, ServerPool, run_eval_groups
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Group
from prime_rl.orchestrator.rollouts.sampling import eval_sampling_args, seeded_for_group
from prime_rl.orchestrator.scheduling.scheduler import Scheduler
from prime_rl.orchestrator.scores import eval_metrics, reward_error_share, score_titles, unscored_line
from prime_rl.orchestrator.servers.policy import Policy
from prime_rl.orchestrator.workers.environment import Environment, rows_to_evaluate
from prime_rl.run.paths import RunPaths
from prime_rl.utils.logger import SUCCESS, get_logger

SOURCE = "orchestrator"
"""Source of these lines in `metrics.jsonl`."""


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One environment, and its rows to evaluate."""

    environment: Environment
    rows: range
    rollouts: int
    """Rollouts per row."""
    max_retries: int
    trained: Overlap | None = None
    """Which of the rows are trained on. None if the run trains on no environment."""

    @classmethod
    def from_config(
        cls, config: EvalEnvConfig, environment: Environment, defaults: EvalConfig | None = None
    ) -> EvalSet:
        """`defaults` fill in numbers that the environment leaves out; the `eval` command has filled in all.

        Raises:
            EnvironmentFault: the environment does not have these rows (`rows_to_evaluate`).
        """
        examples, rollouts = config.num_examples, config.rollouts_per_example
        if defaults is not None:
            examples, rollouts = examples or defaults.num_examples, rollouts or defaults.rollouts_per_example
        assert examples is not None
        assert rollouts is not None
        rows = rows_to_evaluate(environment, config.skip_first, examples)
        return cls(environment, rows, rollouts, config.max_retries)

    @property
    def name(self) -> str:
        return self.environment.name


@dataclass(slots=True)
class EvalSchedule:
    """Decides when an evaluation is due: when the policy version has passed a multiple of `interval`.

    The version need not hit the multiple exactly, because servers may skip versions.
    """

    interval: int
    last: int
    """Policy version of the last evaluation; -1 before the first."""

    @classmethod
    def from_config(cls, config: EvalConfig, resumed_version: int) -> EvalSchedule:
        if resumed_version:
            return cls(config.interval, resumed_version if config.skip_eval_on_resume else resumed_version - 1)
        return cls(config.interval, -1 if config.eval_base_model else 0)

    def due(self, version: int) -> bool:
        return version // self.interval > self.last // self.interval


@dataclass(slots=True)
class Evaluator:
    """Evaluates the policy between batches. Training rollouts in flight continue, but no new ones start."""

    config: EvalConfig
    sets: Sequence[EvalSet]
    schedule: EvalSchedule
    policy: Policy
    pool: ServerPool
    monitor: Monitor
    rollout_log: RolloutLog
    max_concurrent: int
    """Maximum number of concurrent rollouts, over all environments."""
    was_evaluated: Callable[[int], bool]
    """Whether the run has evaluated a version before it was resumed."""
    early_stop: EarlyStop | None = None
    """Gets the scores of each version."""

    def report_to(self, early_stop: EarlyStop) -> None:
        """Give `early_stop` the scores, also of the resumed version if a stop has cut its evaluation short."""
        self.early_stop = early_stop
        resumed = self.policy.version
        if resumed and early_stop.compared_metrics and not early_stop.has_evaluated(resumed):
            self.schedule.last = resumed - 1

    async def run_if_due(self, step: int, scheduler: Scheduler) -> bool:
        """Evaluate before the batch of `step` is collected, if an evaluation is due. Whether it was."""
        if self.early_stop is not None and self.early_stop.keeps_best and step % self.config.interval == 0:
            # Only multiples of the interval are saved for sure, and the servers may otherwise be a version behind, or
            # hold the next one before the next step.
            await self.policy.require_version(step)
        # The batch needs this version anyway. With max_async_level = 0, every evaluation is at an exact multiple.
        await self.policy.require(step)
        if not self.schedule.due(self.policy.version):
            return False
        if self.config.cancel_inflight_rollouts_on_eval:
            await scheduler.interrupt()
        await self._run(step)
        return True

    async def finish(self, version: int) -> None:
        """Wait until the trainer has published `version`, the last one, and evaluate it."""
        await self.policy.require_version(version)
        # A run that resumes at its end may have been stopped during this evaluation.
        if self.policy.version > self.schedule.last or not self.was_evaluated(version):
            await self._run(version)

    async def _run(self, step: int) -> None:
        groups = [group for each in self.sets for group in self._groups(each)]
        async with self.policy.pinned() as version:
            self.schedule.last = version
            started_s = time.perf_counter()
            outcomes = await run_eval_groups(groups, self.pool, version, self.max_concurrent)
        self.rollout_log.write_evaluation(version, outcomes)
        rest = iter(outcomes)
        metrics: dict[str, float] = {"progress/ckpt_step": version}
        for each in self.sets:
            set_outcomes = list(islice(rest, len(each.rows) * each.rollouts))
            set_metrics = eval_metrics(set_outcomes, each.rollouts, each.environment.reward_functions)
            if each.trained is not None:
                set_metrics[METRIC] = each.trained.share
            set_metrics["time"] = max((outcome.ended_s for outcome in set_outcomes), default=started_s) - started_s
            _log_scores(each.name, version, set_metrics, set_outcomes)
            metrics |= {f"eval/{each.name}/{name}": value for name, value in set_metrics.items()}
        self.monitor.log(metrics, step)
        if self.early_stop is not None:
            self.early_stop.evaluated(version, metrics)

    def _groups(self, eval_set: EvalSet) -> Iterator[EvalGroup]:
        # All rollouts of a row are adjacent, so that servers hit their prefix cache.
        for row in eval_set.rows:
            example = ExampleRef(eval_set.name, row)
            for number in range(eval_set.rollouts):
                sampling_args = eval_sampling_args(self.config.sampling, example, number)
                yield EvalGroup(eval_set.environment, example, sampling_args, max_retries=eval_set.max_retries)


def refuse_unknown_function(config: EvalConfig, environments: Mapping[str, Environment]) -> None:
    """Raise EnvironmentFault if `eval.metric` is the mean of a function that its environment does not have."""
    for name, environment in environments.items():
        kind = (config.metric or "").removeprefix(f"eval/{name}/").partition("/")[0]
        if kind not in ("reward_parts", "metrics"):
            continue
        known = [
            f"eval/{name}/{'reward_parts' if weight else 'metrics'}/{each}"
            for each, weight in environment.reward_functions.items()
        ]
        if config.metric not in known:
            raise EnvironmentFault(
                f"orchestrator.eval.metric: no evaluation makes {config.metric!r}: the functions of {name!r} are "
                f"{', '.join(known) or 'none'}"
            )


def is_reported(run: RunPaths, version: int) -> bool:
    """Whether the run's metrics contain an evaluation of a policy version."""
    log = MetricLog(run.metrics)
    log.refresh(read_attempts(run))
    names = (name for name in log.names(SOURCE) if name.startswith("eval/"))
    return any(version in log.series(name, SOURCE) for name in names)


def _log_scores(name: str, version: int, metrics: Mapping[str, float], outcomes: Sequence[Outcome]) -> None:
    if metrics["failed/count"]:
        reason = next(outcome.reason for outcome in outcomes if outcome.reason)
        get_logger().warning(
            f"Evaluation on {name!r}: {metrics['failed/count']} rollouts failed and are not scored; "
            f"first error: {reason}"
        )
    if line := unscored_line([rollout for outcome in outcomes for rollout in outcome.rollouts]):
        get_logger().warning(f"Evaluation on {name!r}: {line}")
    scores = [f"{title}: {metrics[name]:.4f}" for name, title in score_titles(metrics).items()]
    shown = " | ".join([*(scores or ["no rollout succeeded"]), f"Time: {metrics['time']:.2f}s"])
    get_logger().log(SUCCESS, f"Evaluation on {name!r} | Version: {version} | {shown}")


@dataclass(frozen=True, slots=True)
class Validator:
    """Rolls out the same examples each time, so that validations differ only in the policy."""

    config: ValConfig
    environments: Mapping[str, EvalEnvironment]
    examples: list[ExampleRef]
    pool: ServerPool
    max_concurrent: int
    """Maximum number of concurrent groups."""
    trained_share: float = 0.0
    """Share of the examples whose prompt is trained on."""

    def due(self, step: int) -> bool:
        return step % self.config.interval == 0

    async def run(self, step: int, sampling_args: dict[str, Any], version: int) -> dict[str, float]:
        """Returns `val_reward/*`, `val_failed/count` and, with several environments, `val_batch/*`.

        Failed rollouts are counted but not scored.
        """
        size = self.config.rollouts_per_example
        groups = [
            EvalGroup(self.environments[example.env], example, seeded_for_group(sampling_args, example), size)
            for example in self.examples
        ]
        outcomes = await run_eval_groups(groups, self.pool, version, self.max_concurrent)
        failed = sum(outcome.failed for outcome in outcomes)
        if failed:
            reason = next(outcome.reason for outcome in outcomes if outcome.reason)
            get_logger().warning(f"Step {step}: {failed} validation rollouts failed; first error: {reason}")
        scored = [Group(outcome.rollouts) for outcome in outcomes if outcome.rollouts]
        return {"val_failed/count": failed, f"val_{METRIC}": self.trained_share, **validation_metrics(scored)}


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
