"""Ends groups of rollouts that take longer than their environment's limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prime_rl.orchestrator.errors import GroupFailed


class GroupTimeout(GroupFailed):
    """A group took longer than its environment's limit."""


@asynccontextmanager
async def in_time(limit_s: float | None, env: str, row: int) -> AsyncIterator[None]:
    """Cancel the block after `limit_s` seconds. None sets no limit.

    Raises:
        GroupTimeout: the limit was reached. A TimeoutError of the environment's own code passes.
    """
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise GroupTimeout(
            f"environment {env!r}, row {row}: the group takes longer than timeout_s = {limit_s:g} of the environment"
        ) from error
