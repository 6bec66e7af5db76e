"""Whole runs of the scheduler in virtual time: how old rollouts are when they are trained on, and that none is lost."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import selectors
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.orchestrator import BufferConfig
from prime_rl.orchestrator.batches.batch import BatchTarget
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Group, Rollout
from prime_rl.orchestrator.rollouts.trace import TokenTrace
from prime_rl.orchestrator.scheduling.buffer import Buffer
from prime_rl.orchestrator.scheduling.scheduler import RateLimit, Scheduler, SchedulerLimits
from prime_rl.orchestrator.scheduling.staleness import Staleness
from prime_rl.orchestrator.servers.policy import AsyncLimits, Policy
from prime_rl.run.paths import OrchestratorPaths
from prime_rl.utils.logger import get_logger, setup_logger

GROUP_SIZE, NUM_ROWS = 2, 1000


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Never sleeps: when nothing can run, its clock jumps to the next timer. A deadlock raises RuntimeError."""

    def __init__(self) -> None:
        super().__init__(_JumpingSelector(self))
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise RuntimeError("deadlock: nothing runs, and no timer is set")
            # Work takes a moment: a timer that is due now must not be due forever.
            self.loop.now_s += max(timeout, 1e-6)
        return events


@dataclass(slots=True)
class Server:
    groups_in_flight: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Pool:
    servers: list[Server]

    def least_loaded(self) -> Server:
        return min(self.servers, key=lambda server: server.groups_in_flight)


class RecordingBuffer(Buffer):
    """Remembers every example that it gave out."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.drawn: Counter[ExampleRef] = Counter()
        self.rejected: Counter[ExampleRef] = Counter()

    def sample(self) -> ExampleRef:
        example = super().sample()
        self.drawn[example] += 1
        return example

    def accepts(self, group: Group) -> bool:
        accepted = super().accepts(group)
        self.rejected[group.rollouts[0].example] += not accepted
        return accepted


@dataclass
class Conditions:
    """What happens in a run, drawn from a seed."""

    seed: int
    max_level: int = 1
    bounded: bool = True
    groups_per_batch: int = 4
    groups_in_flight: int = 4
    max_off_policy_steps: int = 8
    num_steps: int = 12
    train_s: float = 0.3
    failing: float = 0.0
    """Probability that a group fails."""
    rejected: float = 0.0
    """Probability that all rewards of a group are 1."""
    groups_per_minute: int | None = None
    interrupted: float = 0.0
    """Probability, for each step, that all running groups are cancelled and a server is lost."""

    @classmethod
    def drawn(cls, seed: int, **fixed: Any) -> Conditions:
        draw = random.Random(seed)
        choices = {
            "max_level": draw.randint(0, 3),
            "groups_per_batch": draw.randint(1, 5),
            "groups_in_flight": draw.randint(1, 12),
            "max_off_policy_steps": draw.choice([0, 1, 8]),
            "train_s": draw.choice([0.0, 0.2, 1.0, 5.0]),
            "failing": draw.choice([0.0, 0.2]),
            "rejected": draw.choice([0.0, 0.3]),
            "interrupted": draw.choice([0.0, 0.3]),
            "groups_per_minute": draw.choice([None, None, 30]),
        }
        return cls(seed, **{**choices, **fixed})


@dataclass
class Run:
    """Scheduler, policy and buffer of a run, with a trainer and an environment that take their time."""

    conditions: Conditions
    buffer: RecordingBuffer
    trained: list[tuple[int, Group]] = field(default_factory=list)
    """Every group, with the step that trained on it."""

    def __post_init__(self) -> None:
        limits, self.draw = self.conditions, random.Random(f"run {self.conditions.seed}")
        self.policy = Policy(OrchestratorPaths(Path("nowhere")), None, AsyncLimits(limits.max_level), 1e9)  # type: ignore[arg-type]
        bound = limits.max_level if limits.bounded else None
        staleness = Staleness(limits.groups_per_batch, limits.num_steps, bound)
        sizes = SchedulerLimits(
            GROUP_SIZE,
            limits.groups_in_flight,
            limits.max_off_policy_steps,
            limits.groups_per_minute,
            staleness,
        )
        self.pool = Pool([Server(), Server()])
        self.scheduler = Scheduler({"letters": self}, self.buffer, self.pool, self.policy, sizes)  # type: ignore[arg-type, dict-item]
        self.batches: asyncio.Queue[int] = asyncio.Queue()

    async def run_group(
        self, example: ExampleRef, size: int, server: Any, sampling_args: dict[str, Any], version: int
    ) -> list[Rollout]:
        await asyncio.sleep(self.draw.lognormvariate(-0.5, 1.0))
        if self.draw.random() < self.conditions.failing:
            raise ConnectionError("refused")
        rewards = [1.0, 1.0] if self.draw.random() < self.conditions.rejected else [0.0, 1.0]
        return [Rollout(example, reward, TokenTrace(), 1.0, version) for reward in rewards]

    def waits_for(self) -> str:
        return ""

    async def train(self) -> None:
        """Publish a version after each batch. Servers may miss versions, except those that a batch needs."""
        while True:
            step = await self.batches.get()
            await asyncio.sleep(self.conditions.train_s)
            if self.batches.empty() or self.draw.random() < 0.5:
                await self.policy.announce(step + 1)

    async def steps(self, first: int, last: int) -> None:
        trainer = asyncio.create_task(self.train())
        for step in range(first, last):
            target = BatchTarget(rollouts=self.conditions.groups_per_batch * GROUP_SIZE)
            for group in await self.scheduler.collect(step, target, {}):
                self.trained.append((step, group))
            self.batches.put_nowait(step)
            if self.draw.random() < self.conditions.interrupted:
                await self.scheduler.interrupt()
                self.scheduler.on_server_lost(self.pool.servers[0])
        trainer.cancel()

    @property
    def lags(self) -> list[int]:
        return [step - rollout.version for step, group in self.trained for rollout in group.rollouts]


def make_run(conditions: Conditions) -> Run:
    config = BufferConfig(online_difficulty_filtering=True)
    return Run(conditions, RecordingBuffer({"letters": NUM_ROWS}, config, conditions.seed))


def finished(conditions: Conditions) -> Run:
    async def whole_run() -> Run:
        run = make_run(conditions)
        await run.steps(0, conditions.num_steps)
        await run.scheduler.close()
        return run

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(whole_run())


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What the orchestrator's log warns of."""
    handler, found = logging.Handler(logging.WARNING), []
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    get_logger().addHandler(handler)
    yield found
    get_logger().removeHandler(handler)


def given_up(warnings: list[str]) -> Counter[ExampleRef]:
    rows = (re.search(r"row (\d+)", line) for line in warnings if re.match("Gave up|.*giving up", line))
    return Counter(ExampleRef("letters", int(row[1])) for row in rows if row)


@pytest.mark.parametrize("seed", range(60))
def test_with_the_bound_no_group_is_trained_on_more_than_max_async_level_steps_after_it_started(seed: int) -> None:
    conditions = Conditions.drawn(seed)
    run = finished(conditions)
    assert max(run.lags) <= conditions.max_level
    assert Counter(step for step, _ in run.trained) == dict.fromkeys(
        range(conditions.num_steps), conditions.groups_per_batch
    )


def test_without_the_bound_most_rollouts_are_a_step_older_when_the_trainer_is_slow() -> None:
    slow = {"train_s": 100.0, "groups_per_batch": 8, "groups_in_flight": 8, "num_steps": 20}
    free, bounded = (finished(Conditions(0, bounded=bounded, **slow)).lags for bounded in (False, True))
    assert Counter(free)[2] > len(free) / 2
    assert max(bounded) == 1


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_every_example_drawn_is_trained_on_or_rejected_or_given_up_or_still_to_come(
    seed: int, bounded: bool, warnings: list[str]
) -> None:
    conditions = Conditions.drawn(seed, bounded=bounded)

    async def all_but_the_end() -> tuple[Run, list[ExampleRef]]:
        run = make_run(conditions)
        await run.steps(0, conditions.num_steps - 2)
        still_to_come = run.scheduler.examples_in_flight
        await run.scheduler.close()
        return run, still_to_come

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        run, still_to_come = runner.run(all_but_the_end())
    trained = Counter(group.rollouts[0].example for _, group in run.trained)
    accounted = trained + run.buffer.rejected + given_up(warnings) + Counter(still_to_come)
    assert accounted == run.buffer.drawn


def test_groups_cancelled_for_age_come_again_and_are_given_up_after_the_third_time(warnings: list[str]) -> None:
    """One example takes a hundred times as long as a step, and would be cancelled forever."""

    class OneSlowRow(Run):
        async def run_group(self, example: ExampleRef, *args: Any) -> list[Rollout]:
            self.started[example] += 1
            await asyncio.sleep(100.0 if example == self.slow else 1.0)
            return [Rollout(example, reward, TokenTrace(), 1.0, args[-1]) for reward in (0.0, 1.0)]

    conditions = Conditions(0, bounded=False, max_off_policy_steps=2, num_steps=20, train_s=0.0)

    async def whole_run() -> OneSlowRow:
        run = OneSlowRow(conditions, make_run(conditions).buffer)
        run.started = Counter()
        run.slow = Buffer({"letters": NUM_ROWS}, BufferConfig(), seed=0).sample()
        await run.steps(0, conditions.num_steps)
        await run.scheduler.close()
        return run

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        run = runner.run(whole_run())
    assert run.started[run.slow] == 3
    assert warnings == [
        f"Gave up row {run.slow.row} of environment 'letters': cancelled 3 times after more than 2 weight updates; "
        "raise orchestrator.max_off_policy_steps"
    ]
    assert len(run.trained) == conditions.num_steps * conditions.groups_per_batch


def test_a_batch_that_waits_for_an_old_group_says_so_every_minute(capsys: pytest.CaptureFixture[str]) -> None:
    """The first group takes five minutes; with a bound of 0, the first batch must have it."""

    class SlowStart(Run):
        async def run_group(self, example: ExampleRef, *args: Any) -> list[Rollout]:
            await asyncio.sleep(300.0 if example == self.buffer.first else 1.0)
            return [Rollout(example, reward, TokenTrace(), 1.0, args[-1]) for reward in (0.0, 1.0)]

        def waits_for(self) -> str:
            return "for agents"

    conditions = Conditions(0, max_level=0, num_steps=1)
    setup_logger("info")

    async def whole_run() -> SlowStart:
        run = SlowStart(conditions, make_run(conditions).buffer)
        run.buffer.first = Buffer({"letters": NUM_ROWS}, BufferConfig(), seed=0).sample()
        await run.steps(0, 1)
        return run

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        run = runner.run(whole_run())
    line = "Step 0: waiting for 1 group; the oldest started with version 0: environment 'letters'"
    assert capsys.readouterr().out.count(f"{line}, row {run.buffer.first.row}, which waits for agents") == 4


@pytest.mark.parametrize("most", [1, 3, 20])
def test_no_minute_has_more_starts_than_the_limit_nor_fewer_where_more_wait(most: int) -> None:
    """Not even the first one, nor one that follows a pause."""
    starts: list[float] = []

    async def start(limit: RateLimit, count: int) -> None:
        for _ in range(count):
            await limit.acquire()
            starts.append(asyncio.get_running_loop().time())

    async def bursts() -> None:
        limit, loop = RateLimit(most), asyncio.get_running_loop()
        for at_s in (0.0, 45.0, 1000.0, 1030.0):
            loop.now_s = max(loop.now_s, at_s)
            await asyncio.gather(*(start(limit, most) for _ in range(3)))

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(bursts())
    assert len(starts) == 12 * most
    assert all(later - earlier >= 60.0 for earlier, later in zip(starts, starts[most:], strict=False))
    assert starts[3 * most - 1] < 121
