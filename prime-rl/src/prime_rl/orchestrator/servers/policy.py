"""Tracks the policy version of the inference servers, and loads each new version that the trainer publishes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from prime_rl.configs.orchestrator import NCCLWeightBroadcastConfig
from prime_rl.orchestrator.errors import InferenceFault, OrchestratorError
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.run.paths import OrchestratorPaths, RunPaths, stable_steps, step_of
from prime_rl.run.process import own_beats
from prime_rl.utils.logger import get_logger
from prime_rl.utils.waiting import Wait, advice_on

POLL_S = 0.05
"""Interval between listings of the broadcasts directory. A listing takes microseconds, a late update idles servers."""
LOOK_EVERY_S = 1.0
QUIET_S = 60.0
"""Waits for the trainer are logged only after this time, because a step may take a while."""


class WeightReceiver(Protocol):
    """The part of the server pool that the policy uses."""

    async def update_weights(self, weight_dir: Path | None) -> None: ...


@dataclass(frozen=True, slots=True)
class AsyncLimits:
    """How far rollouts may run ahead of the trainer, in steps."""

    max_level: int
    strict: bool = False
    """Use exactly `step - max_level`, never a later version."""

    def needed_version(self, step: int) -> int:
        """The oldest policy version that may generate the batch of `step`."""
        return max(step - self.max_level, 0)


@dataclass(slots=True)
class PolicyTimes:
    """Seconds spent since the last report."""

    waiting_s: float = 0.0
    updating_s: float = 0.0


@dataclass(slots=True)
class Policy:
    """The policy version that the inference servers serve.

    `follow` loads new versions in the background. `require` blocks a batch until its version is loaded.
    """

    run: OrchestratorPaths
    receiver: WeightReceiver
    limits: AsyncLimits
    timeout_s: float
    """Limit of a wait for the trainer's next version, in seconds."""
    version: int = 0
    """Version that all servers hold."""
    needed: int = 0
    """Oldest version that the current batch may use."""
    listeners: list[Callable[[int], None]] = field(default_factory=list)
    """Called with each new version, once all servers hold it."""
    times: PolicyTimes = field(default_factory=PolicyTimes)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _updating: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def follow(self) -> None:
        """Load each new version as soon as it is complete, until cancelled. Errors of the receiver propagate."""
        while True:
            async with self._updating:
                target = self.target()
                if target is not None:
                    await self._update(target)
            await asyncio.sleep(POLL_S)

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[int]:
        """Yield the version that the servers hold. It does not change inside the block."""
        async with self._updating:
            yield self.version

    async def require(self, step: int) -> None:
        """Wait until the servers hold a version that may generate the batch of `step`."""
        await self.require_version(self.limits.needed_version(step))

    async def require_version(self, version: int) -> None:
        """Wait until the servers hold this version, or a later one unless `limits.strict` is set.

        Raises:
            OrchestratorError: the trainer does not publish it in time.
        """
        self.needed = version
        out = RunPaths.from_orchestrator_dir(self.run.root)
        what = f"the trainer's policy version {version} in {self.run.broadcasts}"
        wait = Wait(
            what,
            advice_on("trainer", out.root, out.logs),
            self.timeout_s,
            "trainer_timeout",
            QUIET_S,
        )
        async with self._changed:
            while self.version < self.needed:
                # During an update, the servers are loading a version that the trainer has published.
                waits_for = "inference" if self._updating.locked() else "trainer"
                own_beats().say(f"waiting for policy version {version}", waits_for)
                if wait.is_over():
                    raise OrchestratorError(wait.fault)
                # Not `wait_for`: in Python 3.11 it forgets a cancellation that comes together with the version.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._changed.wait()
        self.times.waiting_s += wait.waited_s

    def target(self) -> int | None:
        """The version to load now: the newest complete one or, if `limits.strict` is set, the needed one. Else None."""
        stable = stable_steps(self.run.broadcasts)
        if self.limits.strict:
            stable = [version for version in stable if version == self.needed]
        newest = max(stable, default=0)
        return newest if newest > self.version and newest >= self.needed else None

    async def announce(self, version: int) -> None:
        """Record that all servers hold `version`; call the listeners and wake up `require`."""
        self.version = version
        for listener in self.listeners:
            listener(version)
        async with self._changed:
            self._changed.notify_all()

    def take_times(self) -> PolicyTimes:
        times, self.times = self.times, PolicyTimes()
        return times

    async def _update(self, version: int) -> None:
        started = time.monotonic()
        await self.receiver.update_weights(self.run.broadcast(version))
        took_s = time.monotonic() - started
        self.times.updating_s += took_s
        get_logger().debug(f"The inference servers loaded version {version} in {took_s:.2f} s")
        await self.announce(version)


class DirectWeights:
    """Asks the trainer to send a version when the servers are ready to receive it.

    The trainer announces a version in `broadcasts/step_<v>`, waits until our ready marker appears there, and then
    sends the weights to all servers at the same time.
    """

    def __init__(self, run: OrchestratorPaths) -> None:
        self.run = run

    @classmethod
    async def connect(
        cls, config: NCCLWeightBroadcastConfig, pool: InferencePool, run: OrchestratorPaths
    ) -> DirectWeights:
        """Have every server join the trainer's weight group, and request each later version from the trainer.

        Raises:
            InferenceFault: a server could not join.
        """
        get_logger().info(f"The inference servers are joining the trainer at {config.host}:{config.port}")
        await pool.join_weight_group(config.host, config.port, config.timeout)
        direct = cls(run)
        pool.before_update.append(direct.request)
        return direct

    def request(self, weight_dir: Path | None) -> None:
        """Ask the trainer to send the version named by `weight_dir`. None is the base model, which servers read alone.

        Raises:
            InferenceFault: the ready marker cannot be written.
        """
        version = step_of(weight_dir) if weight_dir is not None else None
        if version is None:
            return
        try:
            self.run.broadcast_ready(version).touch()
        except OSError as error:
            raise InferenceFault(f"cannot ask the trainer to send version {version}: {error}") from error

    def close(self) -> None:
        """Tell the trainer that no more versions are needed."""
        self.run.broadcasts.mkdir(parents=True, exist_ok=True)
        self.run.broadcasts_closed.touch()
