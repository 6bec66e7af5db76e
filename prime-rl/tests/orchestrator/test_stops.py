"""Stops the orchestrator's loop at random moments and resumes it: no draw is skipped, and none is trained on twice.

The loop, scheduler, buffer, checkpoints and ledger are real. The environment and the trainer are played.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from prime_rl.configs.orchestrator import BufferConfig, CheckpointConfig, SamplingConfig
from prime_rl.orchestrator.batches.advantage import centred
from prime_rl.orchestrator.batches.batch import BatchTarget
from prime_rl.orchestrator.ckpt import Checkpoints, Progress, remove_stale, restore
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.orchestrator.scheduling.buffer import Buffer
from prime_rl.orchestrator.scheduling.scheduler import Scheduler, SchedulerLimits
from prime_rl.orchestrator.servers.policy import AsyncLimits, Policy
from prime_rl.orchestrator.steps import Steps
from prime_rl.run.ledger import Ledger, check_ledger
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.transport import TrainingBatch
from prime_rl.utils.files import replacing_directory

GROUPS, GROUP_SIZE = 3, 2
Rows = Counter[int]


class Nothing:
    """Stands in for the components that only report. Every call returns an empty answer."""

    def __getattr__(self, name: str) -> Callable[..., dict[str, float]]:
        return lambda *args: {}


@dataclass
class Server:
    groups_in_flight: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Attempt:
    """One attempt of a run: ends by itself, or after a random number of events."""

    paths: RunPaths
    draw: random.Random
    make_rollout: Callable[..., Rollout]
    stops_after: int
    sent: dict[int, Rows] = field(default_factory=dict)
    """Rows in the batch of each step."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.server, self.rows_of = Server(), defaultdict(list)
        self.sending = ThreadPoolExecutor(1)

    def least_loaded(self) -> Server:
        return self.server

    def note_event(self) -> None:
        self.stops_after -= 1
        if self.stops_after < 0:
            self.stop.set()

    async def run_group(self, example: ExampleRef, size: int, *args: Any) -> list[Rollout]:
        for _ in range(self.draw.randrange(8)):
            await asyncio.sleep(0)
        self.note_event()
        fate = self.draw.random()
        if fate < 0.1:
            raise ConnectionError("refused")
        rewards = [1.0, 1.0] if fate < 0.2 else [0.0, 1.0]
        # The completion says which row it is, so that a batch does.
        return [self.make_rollout(example, reward) for reward in rewards[:size]]

    def waits_for(self) -> str:
        return ""

    def send(self, batch: TrainingBatch) -> None:
        rows = Counter(sample.completion_ids[0] for sample in batch.examples)
        self.sent[batch.step] = Counter({row: count // GROUP_SIZE for row, count in rows.items()})

    async def train(self, policy: Policy, done: int) -> None:
        """Publish a version after each batch, and save every other one."""
        while True:
            await asyncio.sleep(0)
            if done in self.sent:
                done += 1
                await policy.announce(done)
                if done % 2 == 0 or self.draw.random() < 0.2:
                    with replacing_directory(self.paths.checkpoint(done)):
                        pass
                self.note_event()

    async def run(self, resume_step: int | None, max_steps: int) -> None:
        remove_stale(self.paths.orchestrator, resume_step or 0)
        ledger = Ledger(self.paths.orchestrator.ledger)
        buffer = Buffer({"letters": 50}, BufferConfig(online_difficulty_filtering=True), 1, ledger=ledger)
        checkpoints = Checkpoints(self.paths, self.paths.orchestrator)
        progress = Progress()
        if resume_step is None:
            ledger.start(0, 0, 0)
        else:
            progress, state = restore(CheckpointConfig(), checkpoints, resume_step)
            assert state is not None
            ledger.start(progress.step, progress.ledger_bytes or 0, state["draws"])
            buffer.restore(state)
        policy = Policy(self.paths.orchestrator, None, AsyncLimits(1), 60.0, progress.step)  # type: ignore[arg-type]
        limits = SchedulerLimits(GROUP_SIZE, 5, self.draw.choice([0, 1, 8]))
        scheduler = Scheduler({"letters": self}, buffer, self, policy, limits)  # type: ignore[arg-type, dict-item]
        nothing: Any = Nothing()
        steps = Steps(
            scheduler=scheduler,
            policy=policy,
            sender=self,  # type: ignore[arg-type]
            sending=self.sending,
            reporter=nothing,
            rollout_log=nothing,
            heartbeat=nothing,
            checkpoints=checkpoints,
            advantage=centred,
            filters=[],
            sampling=SamplingConfig(),
            target=BatchTarget(rollouts=GROUPS * GROUP_SIZE),
            max_steps=max_steps,
        )
        works = (steps.run(progress), self.stop.wait(), self.train(policy, progress.step))
        tasks = [asyncio.create_task(work) for work in works]
        done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.gather(*done)
        await scheduler.close()
        self.sending.shutdown()
        ledger.close()


@pytest.fixture
def make_rollout(turn, rollout) -> Callable[..., Rollout]:
    def make(example: ExampleRef, reward: float) -> Rollout:
        made = rollout(turn([1], [example.row, 2]), reward=reward)
        made.example = example
        return made

    return make


def lose_power(paths: RunPaths, draw: random.Random) -> None:
    """Cut off the end of the ledger that was not flushed: anything after its last checkpoint."""
    ledger, checkpoints = paths.orchestrator.ledger, Checkpoints(paths, paths.orchestrator)
    saved = stable_steps(paths.orchestrator.checkpoints)
    flushed = max((checkpoints.load(step)[0].ledger_bytes or 0 for step in saved), default=0)
    with ledger.open("rb+") as file:
        file.truncate(draw.randint(flushed, ledger.stat().st_size))


class Trained(NamedTuple):
    """The rows of each step of a run that was stopped and resumed."""

    starts: int
    steps: int
    in_ledger: dict[int, Rows]
    sent: dict[int, Rows]


async def stop_and_resume(paths: RunPaths, make_rollout: Callable[..., Rollout], seed: int, stops: int) -> Trained:
    """Stop a run `stops` times at random moments and end it: what the ledger and the sent batches say of its steps."""
    draw, sent, last = random.Random(seed), {}, 0
    for attempt in range(stops + 1):
        common = set(stable_steps(paths.checkpoints)) & set(stable_steps(paths.orchestrator.checkpoints))
        resumed = max(common, default=None)
        is_last = attempt == stops
        played = Attempt(paths, draw, make_rollout, 10**9 if is_last else draw.randrange(40))
        last = (resumed or 0) + 5 if is_last else 10**6
        await played.run(resumed, last)
        sent.update(played.sent)
        if draw.random() < 0.3 and not is_last:
            lose_power(paths, draw)
        _, faults = check_ledger(paths.orchestrator)
        assert faults == [], f"attempt {attempt}"

    account, _ = check_ledger(paths.orchestrator)
    of_steps: dict[int, Rows] = defaultdict(Counter)
    for one in account.draws.values():
        for step in one.steps:
            of_steps[step][one.row] += 1
    return Trained(account.starts, last, of_steps, {step: rows for step, rows in sent.items() if step < last})


@pytest.mark.parametrize("seed", range(3))
async def test_no_draw_is_skipped_or_trained_on_twice_whenever_the_run_stops(seed, make_rollout, tmp_path) -> None:
    trained = await stop_and_resume(RunPaths(tmp_path), make_rollout, seed, stops=10)
    assert (trained.starts, sorted(trained.in_ledger)) == (11, list(range(trained.steps)))
    assert trained.in_ledger == trained.sent


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(25))
async def test_no_draw_is_skipped_or_trained_on_twice_in_500_stops(seed, make_rollout, tmp_path) -> None:
    trained = await stop_and_resume(RunPaths(tmp_path), make_rollout, 100 + seed, stops=20)
    assert (trained.starts, sorted(trained.in_ledger)) == (21, list(range(trained.steps)))
    assert trained.in_ledger == trained.sent
