"""The parts of a run that the config decides."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from prime_rl.configs.orchestrator import BufferConfig, OrchestratorConfig
from prime_rl.orchestrator.buffer import Buffer
from prime_rl.orchestrator.client import InferencePool
from prime_rl.orchestrator.env_processes import EnvServers
from prime_rl.orchestrator.envs import Environment, load_environments
from prime_rl.orchestrator.evaluation import EvalSchedule, EvalSet, Evaluator
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.samples import RolloutLog
from prime_rl.orchestrator.scheduler import SchedulerLimits
from prime_rl.orchestrator.validation import Validator
from prime_rl.utils.logger import get_logger
from prime_rl.utils.monitor import Monitor


@dataclass(frozen=True, slots=True)
class Environments:
    """All environments of a run, by name."""

    train: Mapping[str, Environment]
    eval: Mapping[str, Environment]

    @classmethod
    def load(cls, config: OrchestratorConfig) -> Environments:
        """Load them, and say so. Call it in the main thread: verifiers installs signal handlers."""
        train = load_environments(config.env, config.log)
        evals = load_environments(config.eval.env, config.log, "orchestrator.eval.env", "eval") if config.eval else {}
        for purpose, environments in (("Training", train), ("Evaluation", evals)):
            sizes = [f"{name} ({len(environment)} rows)" for name, environment in environments.items()]
            if sizes:
                get_logger().info(f"{purpose} environments: {', '.join(sizes)}")
        return cls(train, evals)

    async def start_servers(self, config: OrchestratorConfig, servers: EnvServers) -> None:
        """Start a process for each environment that has none yet."""
        await servers.start("train", config.env, self.train.values(), config.log)
        if config.eval is not None:
            await servers.start("eval", config.eval.env, self.eval.values(), config.log)

    async def connect(self) -> None:
        """Raises EnvironmentFault when an environment's server does not answer."""
        await asyncio.gather(*(environment.connect() for environment in self))

    async def close(self) -> None:
        await asyncio.gather(*(environment.close() for environment in self))

    def __iter__(self) -> Iterator[Environment]:
        return chain(self.train.values(), self.eval.values())


def make_buffer(config: OrchestratorConfig, environments: Mapping[str, Environment]) -> Buffer:
    seeds = (seed for seed in (config.buffer.seed, config.seed) if seed is not None)
    return Buffer(
        {name: len(environment) for name, environment in environments.items()},
        config.buffer,
        next(seeds, secrets.randbits(32)),
        lambda example: environments[example.env].fingerprint(example.row, config.buffer.hash_keys),
    )


def make_evaluator(
    config: OrchestratorConfig,
    environments: Mapping[str, Environment],
    policy: Policy,
    pool: InferencePool,
    monitor: Monitor,
    rollout_log: RolloutLog,
) -> Evaluator | None:
    if config.eval is None:
        return None
    pairs = zip(config.eval.env, environments.values(), strict=True)
    return Evaluator(
        config=config.eval,
        sets=[EvalSet.of(each, config.eval, environment) for each, environment in pairs],
        schedule=EvalSchedule.starting(config.eval, policy.version),
        policy=policy,
        pool=pool,
        monitor=monitor,
        rollout_log=rollout_log,
        at_once=_rollouts_in_flight(config),
    )


def make_validator(
    config: OrchestratorConfig, environments: Mapping[str, Environment], pool: InferencePool
) -> Validator | None:
    if config.val is None:
        return None
    held_out = {name: environment.held_out() for name, environment in environments.items()}
    # A buffer of its own, so that validation does not change what is trained on.
    sizes = {name: len(environment) for name, environment in held_out.items()}
    buffer = Buffer(sizes, BufferConfig(env_ratios=config.buffer.env_ratios), config.seed or 0)
    return Validator(
        config=config.val,
        environments=held_out,
        examples=[buffer.sample() for _ in range(config.val.num_examples)],
        pool=pool,
        at_once=scheduler_limits(config).groups_in_flight,
    )


def scheduler_limits(config: OrchestratorConfig) -> SchedulerLimits:
    return SchedulerLimits(
        group_size=config.rollouts_per_example,
        # One group at least, even where the limits are smaller than a group.
        groups_in_flight=max(1, _rollouts_in_flight(config) // config.rollouts_per_example),
        max_off_policy_steps=config.max_off_policy_steps,
        groups_per_minute=config.tasks_per_minute,
    )


def _rollouts_in_flight(config: OrchestratorConfig) -> int:
    return min(config.max_inflight_rollouts or 1, config.max_concurrent or sys.maxsize)
