"""Builds the orchestrator's components, runs them, and closes them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import secrets
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from prime_rl.checks.model_files import known_vocab_size
from prime_rl.configs.orchestrator import BufferConfig, CheckpointConfig, OrchestratorConfig, TeacherModelConfig
from prime_rl.configs.rollouts.judges import TEACHER
from prime_rl.monitors import Monitor
from prime_rl.monitors.base import Heartbeat
from prime_rl.orchestrator.batches.advantage import setup_advantage, try_advantage
from prime_rl.orchestrator.batches.batch import BatchTarget, setup_filters
from prime_rl.orchestrator.batches.teacher import Teachers
from prime_rl.orchestrator.ckpt import Checkpoints, Progress, restore
from prime_rl.orchestrator.early_stop import EarlyStop
from prime_rl.orchestrator.env_checks.examination import EVAL_KEY, Room, placed, refuse_unusable
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.evaluator import (
    EvalSchedule,
    EvalSet,
    Evaluator,
    Validator,
    is_reported,
    refuse_unknown_function,
)
from prime_rl.orchestrator.leaks import overlap, tell
from prime_rl.orchestrator.reports.reporter import Reporter, delay_metrics, sample_interval, setup_monitor
from prime_rl.orchestrator.reports.reward_watch import AnswerLimits, RewardWatch
from prime_rl.orchestrator.reports.rollout_log import RolloutLog
from prime_rl.orchestrator.reports.sessions import traced_ledger
from prime_rl.orchestrator.scheduling.buffer import Buffer
from prime_rl.orchestrator.scheduling.scheduler import Scheduler, SchedulerLimits
from prime_rl.orchestrator.scheduling.staleness import Staleness
from prime_rl.orchestrator.scores import zero_line
from prime_rl.orchestrator.servers.elastic import inference_pool
from prime_rl.orchestrator.servers.policy import AsyncLimits, DirectWeights, Policy
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.orchestrator.steps import EmptyBatches, Sleep, Steps
from prime_rl.orchestrator.stopping import Ending, StopSignals
from prime_rl.orchestrator.workers.blocked import BlockedLoops
from prime_rl.orchestrator.workers.environment import Environment
from prime_rl.orchestrator.workers.failures import failure_metrics
from prime_rl.orchestrator.workers.inside.blocking import LoopWatch
from prime_rl.orchestrator.workers.judges import RunJudges, run_judges
from prime_rl.orchestrator.workers.loading import load_environments, modules_here
from prime_rl.orchestrator.workers.remote import run_in_processes
from prime_rl.run.attempts import checked_files, report_restored
from prime_rl.run.ledger import Ledger, read_ledger
from prime_rl.run.paths import OrchestratorPaths, RunPaths
from prime_rl.run.process import give_clearance, own_beats
from prime_rl.storage.staging import StoredImages
from prime_rl.transport import setup_batch_sender
from prime_rl.utils.images import ShownImages
from prime_rl.utils.logger import SUCCESS, get_logger

COLLECTION_THRESHOLDS = 10_000, 10, 20
"""Thresholds of `gc`. A full scan comes after two million new objects at the earliest, about 25,000 short rollouts. By
default it comes after 77,000."""


def run_orchestrator(config: OrchestratorConfig, resume_step: int | None, sleep: Sleep, ending: Ending) -> int:
    """Run to the end and return the exit code. `sleep` is called between batches without a token to train on.

    Call it in the main thread. Errors before the event loop runs propagate; `ending` explains later ones.
    """
    random.seed(config.seed)
    if config.batch_size is not None and config.batch_size < config.num_train_workers:
        get_logger().warning(
            f"A step has {config.batch_size} rollouts for {config.num_train_workers} trainer processes: some train on "
            "nothing; raise orchestrator.batch_size"
        )
    try_advantage(config)
    own_beats().say("loading the environments")
    with run_judges(config.judge, RunPaths.from_orchestrator_dir(config.output_dir)) as judges:
        environments = Environments.load(config)
        refuse_unusable(placed(environments.train, environments.eval), config)
        if config.eval is not None:
            refuse_unknown_function(config.eval, environments.eval)
        give_clearance(OrchestratorPaths(config.output_dir).environments_checked)
        _collect_garbage_seldom()
        # Environments first: our signal handlers must replace those that verifiers installs for each environment.
        work = _run_until_stopped(config, environments, judges, resume_step, sleep)
        return ending.run(lambda runner: runner.run(work))


def _collect_garbage_seldom() -> None:
    """Scan for garbage less often.

    A rollout in flight has hundreds of objects. By default, Python scans all of them each time their number has grown
    by a quarter.
    """
    gc.freeze()  # loaded modules and environments stay, so collections skip them
    gc.set_threshold(*COLLECTION_THRESHOLDS)


async def _run_until_stopped(
    config: OrchestratorConfig, environments: Environments, judges: RunJudges, resume_step: int | None, sleep: Sleep
) -> int:
    main = asyncio.create_task(_run(config, environments, judges, resume_step, sleep))
    signals = StopSignals()
    signals.watch(main)
    try:
        await main
    except asyncio.CancelledError:
        if signals.received is None:
            raise
        return signals.exit_code
    judges.conclude()
    for environment in environments:
        environment.failures.conclude()
    get_logger().log(SUCCESS, "Orchestrator finished.")
    return 0


async def _ready(pool: InferencePool, use_token_client: bool, run: RunPaths, judges: RunJudges) -> int:
    """Wait for the servers. Returns the newest policy version that a server holds."""
    held_version = await pool.wait_ready(use_token_client, run.server_log)
    judges.say_wait()
    return held_version


async def _run(
    config: OrchestratorConfig, environments: Environments, judges: RunJudges, resume_step: int | None, sleep: Sleep
) -> None:
    paths = OrchestratorPaths(config.output_dir)
    filters = setup_filters(config.filters, config.model.name)
    advantage = setup_advantage(config.advantage, lambda env: environments.train[env].reward_functions)
    ledger = traced_ledger(paths.ledger)
    buffer = make_buffer(config, environments.train, ledger)
    async with AsyncExitStack() as closing:
        closing.callback(ledger.close)
        sender = closing.enter_context(contextlib.closing(setup_batch_sender(config.rollout_transport, paths)))
        lora = config.model.lora
        adapter, limits = lora.adapter_name if lora else None, config.model.image_limits
        shown = None if limits is None else ShownImages(limits, StoredImages())
        pool = inference_pool(config.client, config.model.name, adapter, images=shown)
        closing.push_async_callback(pool.close)
        environments.leave_this_process(config)
        run = RunPaths.from_orchestrator_dir(config.output_dir)
        ready = _ready(pool, config.use_token_client, run, judges)
        # W&B takes seconds to start, so start it while waiting for the servers.
        made = asyncio.to_thread(setup_monitor, config, run, paths)
        (monitor, extras), held_version, _ = await asyncio.gather(made, ready, judges.warm())
        closing.push(lambda kind, error, trace: monitor.close(int(kind is not None)))
        closing.push_async_callback(environments.close)
        blocked = BlockedLoops()
        closing.callback(blocked.conclude)
        await environments.connect(blocked)
        watch = LoopWatch(environments.modules_here(config), blocked.add)
        direct = None
        if config.weight_broadcast.type == "nccl":
            direct = await DirectWeights.connect(config.weight_broadcast, pool, paths)
        checkpoints = Checkpoints(run, paths, config.ckpt or CheckpointConfig(), bool(pool.adapter or direct))
        progress = await _start(config, checkpoints, buffer, pool, resume_step, held_version)
        early_stop = EarlyStop.start(config, run, progress)
        async_limits = AsyncLimits(config.max_async_level, config.strict_async_level)
        policy = Policy(paths, pool, async_limits, config.trainer_timeout, progress.step)
        teacher = await ready_teachers(config, run, closing, environments.train)
        scheduler = Scheduler(environments.train, buffer, pool, policy, scheduler_limits(config), teacher)
        closing.push_async_callback(scheduler.close)
        scheduler.follow(pool)
        heartbeat = Heartbeat(config.heartbeat.url if config.heartbeat else None)
        rollout_log = closing.enter_context(RolloutLog.from_config(config, environments.weights()))
        reward_watch = make_reward_watch(config, environments.train)
        evaluator = make_evaluator(config, environments, policy, pool, monitor, rollout_log)
        if evaluator is not None and early_stop is not None:
            evaluator.report_to(early_stop)
        steps = Steps(
            scheduler=scheduler,
            policy=policy,
            sender=sender,
            sending=closing.enter_context(ThreadPoolExecutor(1, "batches")),
            reporter=Reporter(monitor, filters, sample_interval(config), extras, reward_watch),
            rollout_log=rollout_log,
            heartbeat=closing.enter_context(contextlib.closing(heartbeat)),
            checkpoints=checkpoints if config.ckpt else None,
            advantage=advantage,
            filters=filters,
            sampling=config.sampling,
            target=BatchTarget(config.batch_size, config.token_batch_size),
            max_steps=config.max_steps,
            length_limit=Room.of(config).limit,
            teacher=teacher,
            evaluator=evaluator,
            early_stop=early_stop,
            validator=make_validator(config, environments.train, pool),
            empty=EmptyBatches(sleep),
            free_servers=pool.free_memory if config.servers_sleep else None,
            loop_metrics=lambda: {**delay_metrics(watch.take_delays()), **blocked.take_metrics()},
            pool_metrics=lambda: {**pool.take_metrics(), **judges.take_metrics(), **environments.failure_metrics()},
        )
        background = [policy.follow(), *pool.watchers(), judges.watch(), watch.measure()]
        await _run_steps(steps, progress, background)
        # A teacher's log-probabilities teach without advantages.
        if reward_watch is not None and not config.all_teachers and not config.bench:
            verdict = reward_watch.lessons.verdict(run.root)
            if verdict is not None:
                for env, why in reward_watch.why_zero.items() if reward_watch.lessons.rewards == {0.0} else ():
                    get_logger().warning(f"environment {env!r}: {why}")
                get_logger().warning(verdict)
        if direct is not None:
            direct.close()


async def _start(
    config: OrchestratorConfig,
    checkpoints: Checkpoints,
    buffer: Buffer,
    pool: InferencePool,
    resume_step: int | None,
    held_version: int,
) -> Progress:
    """Restore progress and buffer from a checkpoint, and load the matching weights into the servers."""
    if held_version and (not resume_step or pool.adapter is not None):
        get_logger().info(f"Servers hold version {held_version} of an earlier run: loading the base model")
        await pool.update_weights(None)
    if config.ckpt is None or resume_step is None:
        buffer.ledger.start(0, from_bytes=0, draws=0)
        if config.await_first_version:
            own_beats().say("waiting for the first policy version", waits_for="trainer")
            weights = await checkpoints.await_weights(0, config.trainer_timeout, "orchestrator.trainer_timeout")
            await pool.update_weights(weights)
            get_logger().info(f"The servers loaded the first policy version, {weights}")
        return Progress()
    progress, buffer_state = restore(config.ckpt, checkpoints, resume_step)
    draws = 0 if buffer_state is None else buffer_state["draws"]
    buffer.ledger.start(progress.step, progress.ledger_bytes or 0, draws)
    if buffer_state is not None:
        buffer.restore(buffer_state)
    source = "the base model"
    if progress.step:
        own_beats().say(f"resuming: waiting for the weights of step {progress.step}", waits_for="trainer")
        weights = await checkpoints.await_weights(progress.step, weights_timeout_s(config))
        own_beats().say(f"resuming: loading the weights of step {progress.step}", waits_for="inference")
        await pool.update_weights(weights)
        source = str(weights)
    summary = (
        f"step {progress.step}, {progress.total_samples} rollouts, {progress.total_tokens} tokens so far; buffer "
        f"{'as saved' if buffer_state is not None else 'new'}, {buffer.waiting} examples to draw again; weights from "
        f"{source}"
    )
    get_logger().log(SUCCESS, f"Resumed at {summary}")
    report_restored(summary, _restored(progress, buffer, checkpoints) | {"weights_from": source})
    return progress


def _restored(progress: Progress, buffer: Buffer, checkpoints: Checkpoints) -> dict[str, Any]:
    """Facts about the restored state, for the receipt of this start."""
    account = read_ledger(checkpoints.paths.ledger)
    return {
        "step": progress.step,
        "policy_version": progress.step,
        "progress": asdict(progress),
        "buffer": buffer.summary(),
        "ledger": {
            "drawn": account.num_drawn,
            "trained": account.num_trained,
            "dropped": dict(account.dropped),
            "in_flight": len(account.open),
            "skipped": len(account.skipped),
            "twice": len(account.twice),
        },
        "files": checked_files(checkpoints.paths.checkpoint(progress.step).parent),
    }


def weights_timeout_s(config: OrchestratorConfig) -> float | None:
    """Time limit for the weights to resume from, in seconds. None does not wait.

    With NCCL broadcasts there are no weight files from before, so the run always waits for the trainer.
    """
    configured = None if config.ckpt is None else config.ckpt.wait_for_weights_timeout
    if configured is None and config.weight_broadcast.type == "nccl":
        return config.weight_broadcast.timeout
    return configured


async def _run_steps(steps: Steps, progress: Progress, background: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run the steps and the background tasks. The first failure cancels the rest and is raised."""
    if steps.max_steps is not None and progress.step >= steps.max_steps:
        get_logger().warning(f"Nothing left to do: max_steps is {steps.max_steps}")
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in background]
            await steps.run(progress)
            async with steps.policy.pinned():  # do not cancel a weight update halfway: the trainer may take part in it
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0]  # noqa: B904 - keep the error's own cause, not the group


@dataclass(frozen=True, slots=True)
class Environments:
    """All environments of a run, by name."""

    train: Mapping[str, Environment]
    eval: Mapping[str, Environment]

    @classmethod
    def load(cls, config: OrchestratorConfig) -> Environments:
        """Load all environments and log their sizes. Call it in the main thread: verifiers installs signal handlers.

        Raises:
            EnvironmentFault: an environment cannot be loaded, has no rows, or has images that cannot be read.
        """
        train = load_environments(config.env, config.log)
        evals = load_environments(config.eval.env, config.log, EVAL_KEY, "eval") if config.eval else {}
        vocab_size = known_vocab_size(config.model.name)
        for purpose, environments in (("Training", train), ("Evaluation", evals)):
            sizes = [
                f"{name} ({'endless' if environment.num_rows is None else f'{environment.num_rows} rows'})"
                for name, environment in environments.items()
            ]
            for environment in environments.values():
                environment.image_limits = config.model.image_limits
                environment.check_images()
                environment.vocab_size = vocab_size
            if sizes:
                get_logger().info(f"{purpose} environments: {', '.join(sizes)}")
        return cls(train, evals)

    def leave_this_process(self, config: OrchestratorConfig) -> None:
        """With `env_servers` or `num_workers`, let environments run in processes, which `connect` starts."""
        run_in_processes("train", config.env, self.train.values(), config.log, config.output_dir, config.env_servers)
        if config.eval is not None:
            evals = config.eval.env, self.eval.values()
            run_in_processes("eval", *evals, config.log, config.output_dir, config.env_servers)

    def modules_here(self, config: OrchestratorConfig) -> dict[str, str]:
        """Module of each environment that runs in this process, by name."""
        configs = [*config.env, *(config.eval.env if config.eval else ())]
        return modules_here(configs, [*self.train.values(), *self.eval.values()])

    async def connect(self, blocked: BlockedLoops) -> None:
        """Start all environment processes, and wait for those at addresses. Raises EnvironmentFault."""
        own_beats().say("connecting to the environment servers")
        await asyncio.gather(*(environment.connect(blocked) for environment in self))

    def weights(self) -> dict[str, Mapping[str, float]]:
        """Weight of each reward function, by environment."""
        return {environment.name: environment.reward_functions for environment in self}

    def failure_metrics(self) -> dict[str, float]:
        """`failed_groups/*` of training since the last call."""
        return failure_metrics({name: environment.failures.take_counts() for name, environment in self.train.items()})

    async def close(self) -> None:
        await asyncio.gather(*(environment.close() for environment in self))

    def __iter__(self) -> Iterator[Environment]:
        return chain(self.train.values(), self.eval.values())


async def ready_teachers(
    config: OrchestratorConfig, run: RunPaths, closing: AsyncExitStack, environments: Mapping[str, Environment]
) -> Teachers | None:
    """The teachers, after each has scored a token. None in a run without any. Raises OrchestratorError."""
    if not config.all_teachers:
        return None
    policy = TeacherModelConfig(client=config.client, model=config.model)
    teachers = Teachers(
        [
            each.model_copy(update={"client": policy.client, "model": policy.model}) if each.is_policy else each
            for each in config.all_teachers.values()
        ],
        lambda example: environments[example.env].content(example.row),
        config.model.name,
    )
    closing.push_async_callback(teachers.close)
    if any(each.hint is not None for each in config.all_teachers.values()):
        teachers.check_hints({name: environment.content(0) for name, environment in environments.items()})
    await teachers.wait_ready(run.started_log(TEACHER))
    return teachers


def make_buffer(config: OrchestratorConfig, environments: Mapping[str, Environment], ledger: Ledger) -> Buffer:
    seeds = (seed for seed in (config.buffer.seed, config.seed) if seed is not None)
    return Buffer(
        {name: environment.num_rows for name, environment in environments.items()},
        config.buffer,
        next(seeds, secrets.randbits(32)),
        lambda example: environments[example.env].fingerprint(example.row, config.buffer.hash_keys),
        ledger,
    )


def make_reward_watch(config: OrchestratorConfig, environments: Mapping[str, Environment]) -> RewardWatch | None:
    """The watch over reward functions with a weight. None if nothing is scored."""
    if config.buffer.skip_verification:
        return None
    functions = {name: environment.reward_functions for name, environment in environments.items()}
    return RewardWatch(
        {env: {name: weight for name, weight in weights.items() if weight} for env, weights in functions.items()},
        answer_limits(config),
        lambda env, rollouts: zero_line(rollouts, environments[env]),
    )


def answer_limits(config: OrchestratorConfig) -> AnswerLimits:
    """The limits that end an answer early."""
    room = Room.of(config)
    return AnswerLimits(config.sampling.max_tokens, room.tokens, room.limit)


def make_evaluator(
    config: OrchestratorConfig,
    environments: Environments,
    policy: Policy,
    pool: InferencePool,
    monitor: Monitor,
    rollout_log: RolloutLog,
) -> Evaluator | None:
    if config.eval is None:
        return None
    pairs = zip(config.eval.env, environments.eval.values(), strict=True)
    try:
        sets = [EvalSet.from_config(each, environment, config.eval) for each, environment in pairs]
    except EnvironmentFault as error:
        raise EnvironmentFault(f"orchestrator.eval.env: {error}") from error
    trained = environments.train.values()
    sets = [replace(each, trained=overlap(each.environment, each.rows, trained)) for each in sets]
    for each in sets:
        if each.trained is not None:
            tell(f"Evaluation on {each.name!r}", each.trained)
    return Evaluator(
        config=config.eval,
        sets=sets,
        schedule=EvalSchedule.from_config(config.eval, policy.version),
        policy=policy,
        pool=pool,
        monitor=monitor,
        rollout_log=rollout_log,
        max_concurrent=_max_rollouts_in_flight(config),
        was_evaluated=partial(is_reported, RunPaths.from_orchestrator_dir(config.output_dir)),
    )


def make_validator(
    config: OrchestratorConfig, environments: Mapping[str, Environment], pool: InferencePool
) -> Validator | None:
    if config.val is None:
        return None
    held_out = {name: environment.held_out() for name, environment in environments.items()}
    # A separate buffer, so that validation does not change which examples are trained on.
    sizes = {name: environment.num_rows for name, environment in held_out.items()}
    buffer = Buffer(sizes, BufferConfig(env_ratios=config.buffer.env_ratios), config.seed or 0)
    examples = [buffer.sample() for _ in range(config.val.num_examples)]
    leaked = 0
    for name, environment in held_out.items():
        rows = range(len(environment) if environment.num_rows is not None else 0)
        found = overlap(environment, rows, environments.values())
        tell(f"Validation on {name!r}", found)
        leaked += round(found.share * sum(example.env == name for example in examples))
    return Validator(
        config=config.val,
        environments=held_out,
        examples=examples,
        trained_share=leaked / max(len(examples), 1),
        pool=pool,
        max_concurrent=scheduler_limits(config).groups_in_flight,
    )


def scheduler_limits(config: OrchestratorConfig) -> SchedulerLimits:
    return SchedulerLimits(
        group_size=config.rollouts_per_example,
        # At least one group, even if the limits are smaller than a group.
        groups_in_flight=max(1, _max_rollouts_in_flight(config) // config.rollouts_per_example),
        max_off_policy_steps=config.max_off_policy_steps,
        groups_per_minute=config.tasks_per_minute,
        staleness=_staleness(config),
    )


def _staleness(config: OrchestratorConfig) -> Staleness | None:
    if config.batch_size is None:
        return None
    # At level 0, a group that starts during a step can only be used by this step, bounded or not.
    bounded = config.bound_lag or config.max_async_level == 0
    return Staleness(
        config.batch_size // config.rollouts_per_example, config.max_steps, config.max_async_level if bounded else None
    )


def _max_rollouts_in_flight(config: OrchestratorConfig) -> int:
    return min(config.max_inflight_rollouts or 1, config.max_concurrent or sys.maxsize)
