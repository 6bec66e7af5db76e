"""What the RL trainer's tests share."""

from __future__ import annotations

import pytest

from prime_rl.trainer.process.world import World, destroy_world, setup_world


@pytest.fixture
def world() -> World:
    """This process as the whole world."""
    yield setup_world("cpu", timeout_s=60)
    destroy_world()
