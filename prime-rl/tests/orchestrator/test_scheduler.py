from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.orchestrator import BufferConfig
from prime_rl.orchestrator.batches.batch import BatchTarget
from prime_rl.orchestrator.errors import EnvironmentFault, MalformedRollout, TooManyFailures
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.orchestrator.scheduling.buffer import Buffer
from prime_rl.orchestrator.scheduling.scheduler import MAX_ATTEMPTS, Scheduler, SchedulerLimits
from prime_rl.orchestrator.scheduling.staleness import Staleness
from prime_rl.orchestrator.servers.policy import AsyncLimits, Policy
from prime_rl.run.paths import OrchestratorPaths
from prime_rl.run.process import own_beats

Outcome = list[Rollout] | Exception


@dataclass(slots=True)
class Server:
    """A server, as far as the scheduler looks at it."""

    groups_in_flight: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)


class Pool:
    def __init__(self, *servers: Server) -> None:
        self.servers = list(servers)

    def least_loaded(self) -> Server:
        return min(self.servers, key=lambda server: server.groups_in_flight)


@dataclass
class Environment:
    """Runs groups that end when the test says so; `outcome`, if set, ends each at once."""

    outcome: Callable[[ExampleRef], Outcome] | None = None
    running: list[tuple[ExampleRef, asyncio.Future[Outcome]]] = field(default_factory=list)
    cancelled: list[ExampleRef] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)
    started: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run_group(
        self, example: ExampleRef, size: int, server: Any, sampling_args: dict[str, Any], version: int
    ) -> list[Rollout]:
        self.versions.append(version)
        self.temperatures.append(sampling_args["temperature"])
        self.seeds.append(sampling_args.get("seed"))
        end: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.running.append((example, end))
        async with self.started:
            self.started.notify_all()
        try:
            outcome = self.outcome(example) if self.outcome else await end
        except asyncio.CancelledError:
            self.cancelled.append(example)
            raise
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def waits_for(self) -> str:
        return ""

    async def wait_for(self, count: int) -> None:
        """Wait until `count` groups have started."""
        async with self.started:
            await self.started.wait_for(lambda: len(self.running) >= count)


@dataclass
class Deaf(Environment):
    """Runs groups that do not end when they are cancelled, until they may."""

    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def run_group(self, *args: Any) -> list[Rollout]:
        try:
            return await super().run_group(*args)
        finally:
            await self.may_end.wait()


ARGS = {"temperature": 1.0}


def make_scheduler(
    tmp_path: Path, environment: Environment, pool: Pool | None = None, groups: int = 2, **limits: Any
) -> Scheduler:
    buffer = Buffer({"letters": 1000}, BufferConfig(), seed=0)
    policy = Policy(OrchestratorPaths(tmp_path), None, AsyncLimits(1), timeout_s=3600.0)
    sizes = SchedulerLimits(2, groups, **{"max_off_policy_steps": 8, **limits})
    return Scheduler({"letters": environment}, buffer, pool or Pool(Server()), policy, sizes)


@pytest.fixture
def pair(turn, rollout) -> list[Rollout]:
    """The rollouts of a group that went well."""
    return [rollout(turn([1], [2]), reward=reward) for reward in (0.0, 1.0)]


async def test_groups_beyond_the_target_stay_for_the_next_batch(tmp_path: Path, pair) -> None:
    environment = Environment()
    scheduler = make_scheduler(tmp_path, environment, groups=3)
    collecting = asyncio.create_task(scheduler.collect(0, BatchTarget(rollouts=2), ARGS))
    await environment.wait_for(3)
    for _, end in environment.running:
        end.set_result(pair)
    assert len(await collecting) == 1
    assert scheduler.groups_in_flight == 2

    assert len(await scheduler.collect(1, BatchTarget(rollouts=4), ARGS)) == 2
    await scheduler.close()


async def test_a_token_target_counts_the_last_turn_of_each_rollout(tmp_path: Path, pair) -> None:
    scheduler = make_scheduler(tmp_path, Environment(lambda example: pair))
    assert len(await scheduler.collect(0, BatchTarget(tokens=9), ARGS)) == 3
    await scheduler.close()


class Scorer:
    """A teacher whose scores are never ready."""

    def __init__(self) -> None:
        self.begun: list[list[Rollout]] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.began = asyncio.Event()

    def begin(self, rollouts: list[Rollout]) -> asyncio.Task[Any]:
        self.begun.append(rollouts)
        self.tasks.append(asyncio.create_task(asyncio.Event().wait()))
        self.began.set()
        return self.tasks[-1]


async def test_a_teacher_scores_a_group_when_it_ends_and_no_group_that_is_not_used(
    tmp_path: Path, pair, rollout
) -> None:
    environment, scorer = Environment(), Scorer()
    scheduler = make_scheduler(tmp_path, environment, groups=2)
    scheduler.teacher = scorer
    scheduler.buffer.config = scheduler.buffer.config.model_copy(update={"online_difficulty_filtering": True})
    collecting = asyncio.create_task(scheduler.collect(0, BatchTarget(rollouts=4), ARGS))
    await environment.wait_for(2)
    environment.running[0][1].set_result(pair)
    await scorer.began.wait()
    assert scorer.begun == [pair], "the other group runs still"
    useless = [rollout(each.trace.calls[0], reward=1.0) for each in pair]
    environment.running[1][1].set_result(useless)
    await environment.wait_for(4)
    assert [task.cancelling() > 0 for task in scorer.tasks] == [False, True]
    environment.running[2][1].set_result(pair)
    groups = await collecting
    assert [group.scored_samples for group in groups] == [scorer.tasks[0], scorer.tasks[2]]
    await scheduler.close()
    for task in scorer.tasks:
        task.cancel()


class Counted(list):
    """A list that counts how often all of it is read."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()


@pytest.mark.parametrize("target", [BatchTarget(rollouts=64), BatchTarget(tokens=96)])
async def test_a_group_of_a_batch_is_not_looked_at_again_for_each_other_group(tmp_path: Path, pair, target) -> None:
    scheduler = make_scheduler(tmp_path, Environment(lambda example: Counted(pair)), groups=32)
    groups = await scheduler.collect(0, target, ARGS)
    assert len(groups) > 20
    reads = [group.rollouts.reads for group in groups]
    assert len(set(reads)) == 1, "the first group was read more often than the last one"
    await scheduler.close()


async def test_no_group_starts_that_the_run_cannot_use(tmp_path: Path, pair) -> None:
    environment = Environment(lambda example: pair)
    scheduler = make_scheduler(tmp_path, environment, groups=8, staleness=Staleness(groups_per_batch=3, max_steps=1))
    await scheduler.collect(0, BatchTarget(rollouts=6), ARGS)
    assert len(environment.running) == 3
    assert scheduler.groups_in_flight == 0


async def test_groups_start_at_most_so_often_a_minute(tmp_path: Path, pair) -> None:
    environment = Environment(lambda example: pair)
    scheduler = make_scheduler(tmp_path, environment, groups=3, groups_per_minute=2)
    await scheduler.collect(0, BatchTarget(rollouts=4), ARGS)
    assert len(environment.running) == 2
    assert scheduler.groups_in_flight > 0
    await scheduler.close()


async def test_a_run_that_its_limit_of_groups_a_minute_holds_says_so(tmp_path: Path, pair) -> None:
    said: list[str] = []
    heard = asyncio.Event()

    async def said_last(words: str) -> None:
        while words not in said[-1]:
            heard.clear()
            await heard.wait()

    own_beats().follow(lambda doing, waits_for: (said.append(doing), heard.set()))
    environment = Environment()
    scheduler = make_scheduler(tmp_path, environment, groups=3, groups_per_minute=2)
    collecting = asyncio.create_task(scheduler.collect(0, BatchTarget(rollouts=6), ARGS))
    held = "may not start yet: tasks_per_minute = 2"
    await said_last(f"; 1 group {held}")
    assert said[-1].startswith("step 0: waiting for 2 groups; the oldest started with version 0: environment ")
    for _, end in environment.running:
        end.set_result(pair)
    await said_last(f"3 groups {held}")
    assert said[-1] == f"step 0: 3 groups {held}"
    collecting.cancel()
    await scheduler.close()


async def test_a_group_that_may_not_start_yet_does_not_age(tmp_path: Path) -> None:
    environment = Environment()
    scheduler = make_scheduler(tmp_path, environment, groups=3, groups_per_minute=2, max_off_policy_steps=0)
    collecting = asyncio.create_task(scheduler.collect(0, BatchTarget(rollouts=6), ARGS))
    await environment.wait_for(2)
    for version in range(1, MAX_ATTEMPTS + 2):
        await scheduler.policy.announce(version)
    assert scheduler.take_cancelled() == len(environment.running) == 2
    collecting.cancel()
    await scheduler.close()


async def seeds_of(
    folder: Path, outcome: Outcome, state: Mapping[str, Any] | None = None
) -> tuple[list[int | None], dict[str, Any]]:
    """The seeds of the groups that start for two batches, and the buffer's state after them."""
    environment = Environment(lambda example: outcome)
    scheduler = make_scheduler(folder, environment)
    if state is not None:
        scheduler.buffer.restore(state)
    for step in range(2):
        await scheduler.collect(step, BatchTarget(rollouts=4), ARGS | {"seed": 7})
    state = scheduler.buffer.state(scheduler.examples_in_flight)
    await scheduler.close()
    return environment.seeds, state


async def test_each_group_has_a_seed_of_its_own_also_after_a_resume(tmp_path: Path, pair) -> None:
    first, state = await seeds_of(tmp_path / "first", pair)
    resumed, _ = await seeds_of(tmp_path / "resumed", pair, state)
    assert len({*first, *resumed}) == len(first) + len(resumed) >= 8
    assert (await seeds_of(tmp_path / "again", pair))[0] == first


async def test_each_group_goes_to_the_server_with_the_fewest(tmp_path: Path) -> None:
    pool, environment = Pool(Server(), Server()), Environment()
    scheduler = make_scheduler(tmp_path, environment, pool, groups=4)
    collecting = asyncio.create_task(scheduler.collect(0, BatchTarget(rollouts=2), ARGS))
    await environment.wait_for(4)
    assert [server.groups_in_flight for server in pool.servers] == [2, 2]
    collecting.cancel()
    await scheduler.close()


async def test_interrupted_groups_come_again_first_and_finished_ones_are_kept(tmp_path: Path, pair) -> None:
    environment = Environment()
    scheduler = make_scheduler(tmp_path, environment, groups=3)
    collecting = asyncio.create_task(scheduler.collect(0, BatchTarget(rollouts=2), ARGS))
    await environment.wait_for(3)
    for _, end in environment.running[:2]:
        end.set_result(pair)
    await collecting
    (still_running,) = [example for example, end in environment.running if not end.done()]
    await scheduler.interrupt()
    assert environment.cancelled == [still_running]
    assert scheduler.groups_in_flight == 1
    assert len(await scheduler.collect(1, BatchTarget(rollouts=2), ARGS)) == 1
    await environment.wait_for(4)
    assert environment.running[3][0] == still_running
    await scheduler.close()


async def test_the_groups_of_a_lost_server_run_again_elsewhere(tmp_path: Path, pair) -> None:
    pool, environment = Pool(Server(), Server()), Environment()
    scheduler = make_scheduler(tmp_path, environment, pool, groups=2)
    collecting = asyncio.create_task(scheduler.collect(0, BatchTarget(rollouts=4), ARGS))
    await environment.wait_for(2)
    lost = pool.servers.pop(0)
    scheduler.on_server_lost(lost)
    await environment.wait_for(3)
    (example,) = environment.cancelled
    assert environment.running[2][0] == example
    assert (lost.groups_in_flight, pool.servers[0].groups_in_flight) == (0, 2)
    for _, end in environment.running[1:]:
        end.set_result(pair)
    assert len(await collecting) == 2
    await scheduler.close()


async def test_a_batch_waits_for_its_policy_version(tmp_path: Path, pair) -> None:
    environment = Environment(lambda example: pair)
    scheduler = make_scheduler(tmp_path, environment)
    collecting = asyncio.create_task(scheduler.collect(2, BatchTarget(rollouts=2), ARGS))
    await asyncio.sleep(0)
    assert not environment.running
    await scheduler.policy.announce(1)
    await collecting
    assert set(environment.versions) == {1}
    await scheduler.close()


async def test_groups_age_with_every_update_and_are_cancelled_when_too_old(tmp_path: Path, pair) -> None:
    environment = Environment()
    scheduler = make_scheduler(tmp_path, environment, groups=2, max_off_policy_steps=1)
    collecting = asyncio.create_task(scheduler.collect(0, BatchTarget(rollouts=4), ARGS))
    await environment.wait_for(2)
    await scheduler.policy.announce(1)
    environment.running[0][1].set_result(pair)
    await environment.wait_for(3)
    await scheduler.policy.announce(2)

    await environment.wait_for(4)
    assert environment.cancelled == [environment.running[1][0]]
    assert environment.running[3][0] == environment.running[1][0]
    assert scheduler.take_cancelled() == 1
    environment.running[2][1].set_result(pair)
    assert [group.off_policy_level for group in await collecting] == [1, 1]
    assert environment.versions[3:] == [2]
    await scheduler.close()


async def test_a_finished_group_that_nobody_collected_ages_too(tmp_path: Path, pair) -> None:
    environment = Environment(lambda example: pair)
    scheduler = make_scheduler(tmp_path, environment, groups=3, max_off_policy_steps=0)
    await scheduler.collect(0, BatchTarget(rollouts=2), ARGS)
    assert scheduler.groups_in_flight == 2
    await scheduler.policy.announce(1)
    assert scheduler.groups_in_flight == 0
    assert len(await scheduler.collect(1, BatchTarget(rollouts=2), ARGS)) == 1
    await scheduler.close()


async def test_a_failed_group_is_tried_again_and_then_given_up(tmp_path: Path, pair) -> None:
    tried: list[ExampleRef] = []

    def outcome(example: ExampleRef) -> Outcome:
        tried.append(example)
        return KeyError("broken row") if example == tried[0] else pair

    scheduler = make_scheduler(tmp_path, Environment(outcome), groups=1)
    await scheduler.collect(0, BatchTarget(rollouts=2), ARGS)
    assert tried[:MAX_ATTEMPTS] == [tried[0]] * MAX_ATTEMPTS
    assert tried[MAX_ATTEMPTS] != tried[0]
    await scheduler.close()


async def test_when_every_group_fails_the_run_stops_with_the_last_error(tmp_path: Path) -> None:
    environment = Environment(lambda example: MalformedRollout("no rollout of the group has token ids"))
    scheduler = make_scheduler(tmp_path, environment, groups=2)
    with pytest.raises(TooManyFailures, match=r"8 groups of rollouts failed .* no rollout of the group has token ids"):
        await scheduler.collect(0, BatchTarget(rollouts=2), ARGS)
    await scheduler.close()


async def test_an_environment_that_cannot_be_used_ends_the_run_at_once(tmp_path: Path) -> None:
    environment = Environment(lambda example: EnvironmentFault("it shows the model images"))
    scheduler = make_scheduler(tmp_path, environment, groups=2)
    with pytest.raises(EnvironmentFault, match="it shows the model images"):
        await scheduler.collect(0, BatchTarget(rollouts=2), ARGS)
    await scheduler.close()


async def test_a_group_that_is_not_accepted_is_replaced(tmp_path: Path, pair, rollout) -> None:
    seen: list[ExampleRef] = []

    def outcome(example: ExampleRef) -> Outcome:
        seen.append(example)
        return [rollout(reward=1.0)] * 2 if len(seen) < 3 else pair

    scheduler = make_scheduler(tmp_path, Environment(outcome), groups=1)
    scheduler.buffer.config = BufferConfig(online_difficulty_filtering=True)
    (group,) = await scheduler.collect(0, BatchTarget(rollouts=2), ARGS)
    assert group.rollouts == pair
    await scheduler.close()


@pytest.mark.parametrize("end", [Scheduler.interrupt, Scheduler.close])
async def test_groups_whose_environment_catches_the_cancellation_are_left_behind(tmp_path: Path, end) -> None:
    environment = Deaf()
    scheduler = make_scheduler(tmp_path, environment, ending_s=0.0)
    collecting = asyncio.create_task(scheduler.collect(0, BatchTarget(rollouts=4), ARGS))
    await environment.wait_for(2)
    await end(scheduler)
    assert scheduler.groups_in_flight == 0
    collecting.cancel()
    environment.may_end.set()


async def test_closing_cancels_all_groups_and_waits_for_them(tmp_path: Path) -> None:
    environment = Environment()
    scheduler = make_scheduler(tmp_path, environment, groups=2)
    collecting = asyncio.create_task(scheduler.collect(0, BatchTarget(rollouts=2), ARGS))
    await environment.wait_for(2)
    in_flight = scheduler.examples_in_flight
    collecting.cancel()
    await scheduler.close()
    assert environment.cancelled == in_flight


@pytest.mark.parametrize(
    ("rewards", "reason", "advice"),
    [
        ((0.0, 0.0), "every reward 0", "use easier examples"),
        ((1.0, 1.0), "every reward 1", "use harder examples"),
        ((0.5, 0.5), "equal rewards", "use rewards that differ"),
    ],
)
async def test_a_run_whose_groups_are_rejected_says_how_many_why_and_what_to_change(
    tmp_path: Path, turn, rollout, caplog, rewards: tuple[float, float], reason: str, advice: str
) -> None:
    said: list[str] = []
    own_beats().follow(lambda doing, waits_for: said.append(doing))
    attempts = [rollout(turn([1], [2]), reward=reward) for reward in rewards]
    environment = Environment()
    scheduler = make_scheduler(tmp_path, environment, groups=1)
    scheduler.buffer.config = BufferConfig(online_difficulty_filtering=True, drop_equal_rewards=True)
    collecting = asyncio.create_task(scheduler.collect(1, BatchTarget(rollouts=2), ARGS))
    with caplog.at_level("WARNING"):
        for count in range(1, 12):
            await environment.wait_for(count)
            environment.running[-1][1].set_result(attempts)
        await environment.wait_for(12)
    collecting.cancel()
    await scheduler.close()
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.startswith(f"Step 1: 10 of 10 groups rejected (10 with {reason}): ")
    assert advice in warning[:200], "STATUS.md shows as many characters"
    assert warning.endswith(", or turn off buffer.online_difficulty_filtering and buffer.drop_equal_rewards")
    assert said[-1].startswith(f"step 1: 11 of 11 groups rejected (11 with {reason}); waiting for 1 group")
