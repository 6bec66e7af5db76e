from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from prime_rl.orchestrator.errors import InferenceFault, OrchestratorError
from prime_rl.orchestrator.servers.policy import AsyncLimits, Policy
from prime_rl.run.paths import OrchestratorPaths
from prime_rl.utils.files import replacing_directory


class Receiver:
    """Servers that note what they are given."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.loaded: list[Path | None] = []
        self.fault = fault

    async def update_weights(self, weight_dir: Path | None) -> None:
        if self.fault:
            raise self.fault
        self.loaded.append(weight_dir)


def make_policy(root: Path, limits: AsyncLimits, receiver: Receiver | None = None, timeout_s: float = 60.0) -> Policy:
    return Policy(OrchestratorPaths(root), receiver or Receiver(), limits, timeout_s)


def publish(policy: Policy, version: int) -> None:
    with replacing_directory(policy.run.broadcast(version)) as scratch:
        (scratch / "model.safetensors").touch()


@pytest.mark.parametrize(
    ("max_level", "needed"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2]), (2, [0, 0, 0, 1]), (9, [0, 0, 0, 0])]
)
def test_a_batch_needs_a_version_at_most_the_async_level_old(max_level: int, needed: list[int]) -> None:
    assert [AsyncLimits(max_level).needed_version(step) for step in range(4)] == needed


def test_the_newest_complete_version_is_loaded(tmp_path: Path) -> None:
    policy = make_policy(tmp_path, AsyncLimits(1))
    assert policy.target() is None
    publish(policy, 1)
    publish(policy, 2)
    policy.run.broadcast(3).mkdir()
    assert policy.target() == 2


def test_a_strict_level_loads_the_needed_version_and_no_other(tmp_path: Path) -> None:
    policy = make_policy(tmp_path, AsyncLimits(2, strict=True))
    publish(policy, 2)
    policy.needed = 1
    assert policy.target() is None
    publish(policy, 1)
    assert policy.target() == 1


async def test_the_barrier_opens_when_the_needed_version_is_on_all_servers(tmp_path: Path) -> None:
    receiver = Receiver()
    policy = make_policy(tmp_path, AsyncLimits(1), receiver)
    heard: list[int] = []
    policy.listeners.append(heard.append)
    following = asyncio.create_task(policy.follow())
    await policy.require(1)

    barrier = asyncio.create_task(policy.require(3))
    await asyncio.sleep(0)
    assert not barrier.done()
    publish(policy, 2)
    await barrier
    following.cancel()
    assert (policy.version, heard, receiver.loaded) == (2, [2], [policy.run.broadcast(2)])
    assert policy.take_times().waiting_s > 0


async def test_a_trainer_that_publishes_nothing_ends_the_wait_by_name(tmp_path: Path) -> None:
    policy = make_policy(tmp_path / "out" / "run_default", AsyncLimits(1), timeout_s=0.0)
    with pytest.raises(OrchestratorError) as caught:
        await policy.require(2)
    fault = str(caught.value)
    assert fault.startswith(f"waited for the trainer's policy version 1 in {policy.run.broadcasts} since ")
    assert "(limit: trainer_timeout = 0 s)" in fault
    assert f"start it with `trainer --output-dir {tmp_path / 'out'}`" in fault


async def test_a_failed_update_surfaces(tmp_path: Path) -> None:
    policy = make_policy(tmp_path, AsyncLimits(1), Receiver(InferenceFault("it refuses")))
    publish(policy, 1)
    with pytest.raises(InferenceFault, match="it refuses"):
        await policy.follow()
    assert policy.version == 0
