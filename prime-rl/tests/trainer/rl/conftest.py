"""Fixtures of the RL trainer's tests."""

from __future__ import annotations

import pytest

from prime_rl.trainer.process.mesh import Mesh, ParallelDims
from prime_rl.trainer.process.world import destroy_world, setup_world


@pytest.fixture
def mesh() -> Mesh:
    """A mesh with only this process."""
    yield ParallelDims(dp_replicate=1, dp_shard=1).mesh(setup_world("cpu", timeout_s=3600))
    destroy_world()
