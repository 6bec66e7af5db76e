"""Compares throughput and lag with and without `orchestrator.bound_lag`, in virtual time.

    uv run python benchmarks/rl/lag_bound.py [--steps 60] [--repeats 5]

Runs the orchestrator's scheduler with an engine and a trainer that only take time. No time really passes, so other work
on the machine does not change the result. A batch has 16 groups, and 16 groups are in flight. A group takes 1 second
on average, lognormally distributed; the trainer takes a constant time for each step.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import selectors
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.configs.orchestrator import BufferConfig
from prime_rl.orchestrator.batches.batch import BatchTarget
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.orchestrator.rollouts.trace import TokenTrace
from prime_rl.orchestrator.scheduling.buffer import Buffer
from prime_rl.orchestrator.scheduling.scheduler import Scheduler, SchedulerLimits
from prime_rl.orchestrator.scheduling.staleness import Staleness
from prime_rl.orchestrator.servers.policy import AsyncLimits, Policy
from prime_rl.run.paths import OrchestratorPaths

GROUPS = 16
TRAINERS_S = {"slow engine": 0.1, "balanced": 0.8, "slow trainer": 3.0}
SPREADS = (0.2, 0.35, 0.5)
"""Standard deviations of the logarithm of a group's duration."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Never sleeps: when nothing can run, its clock jumps to the next timer."""

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
        self.loop.now_s += max(timeout or 0.0, 1e-6)
        return super().select(0)


@dataclass(slots=True)
class Server:
    groups_in_flight: int = 0

    def least_loaded(self) -> Server:
        return self


@dataclass(frozen=True, slots=True)
class Engine:
    """Takes a random time for each group."""

    spread: float
    draw: random.Random

    async def run_group(
        self, example: ExampleRef, size: int, server: Any, sampling_args: dict[str, Any], version: int
    ) -> list[Rollout]:
        await asyncio.sleep(self.draw.lognormvariate(-(self.spread**2) / 2, self.spread))
        return [Rollout(example, 0.0, TokenTrace(), 1.0, version) for _ in range(size)]


@dataclass(frozen=True, slots=True)
class Result:
    s_per_step: float
    mean_lag: float
    max_lag: int


async def run(max_lag: int | None, level: int, spread: float, train_s: float, steps: int, seed: int) -> Result:
    policy = Policy(OrchestratorPaths(Path("none")), None, AsyncLimits(level), timeout_s=60.0)
    limits = SchedulerLimits(1, GROUPS, 8, staleness=Staleness(GROUPS, steps, max_lag))
    buffer = Buffer({"a": 1000}, BufferConfig(), seed)
    scheduler = Scheduler({"a": Engine(spread, random.Random(seed))}, buffer, Server(), policy, limits)
    batches: asyncio.Queue[int] = asyncio.Queue()

    async def train() -> None:
        for _ in range(steps):
            step = await batches.get()
            await asyncio.sleep(train_s)
            await policy.announce(step + 1)

    training, lags = asyncio.create_task(train()), []
    for step in range(steps):
        groups = await scheduler.collect(step, BatchTarget(rollouts=GROUPS), {})
        lags += [step - group.rollouts[0].version for group in groups]
        batches.put_nowait(step)
    await training
    return Result(asyncio.get_running_loop().time() / steps, statistics.fmean(lags), max(lags))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rows = {"k = 1": (None, 1), "k = 1, bound_lag": (1, 1), "k = 2, bound_lag": (2, 2)}
    print("s per step (mean lag, max lag)")
    print(f"{'':24}" + "".join(f"{name:>24}" for name in rows))
    for name, train_s in TRAINERS_S.items():
        for spread in SPREADS:
            cells = []
            for max_lag, level in rows.values():
                results = []
                for seed in range(args.repeats):
                    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
                        results.append(runner.run(run(max_lag, level, spread, train_s, args.steps, seed)))
                s_per_step = statistics.fmean(result.s_per_step for result in results)
                mean_lag = statistics.fmean(result.mean_lag for result in results)
                cells.append(f"{s_per_step:.2f} ({mean_lag:.2f}, {max(result.max_lag for result in results)})")
            print(f"{name:14}{f'spread {spread}':10}" + "".join(f"{cell:>24}" for cell in cells))


if __name__ == "__main__":
    main()
