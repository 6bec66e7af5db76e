"""One trainer process inside the test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prime_rl.trainer.world import World, destroy_world, setup_world


@pytest.fixture
def world() -> Iterator[World]:
    """A world of this process alone, on the CPU."""
    yield setup_world("cpu", timeout_s=60, environ={})
    destroy_world()
