"""Tells a watchdog that the run goes on."""

from __future__ import annotations

import asyncio

import aiohttp

from prime_rl.utils.logger import get_logger

TIMEOUT_S = 1.0


class Heartbeat:
    """One GET a step, in the background. A step is left out while the last call is pending; failures are warnings.

    Without a URL nothing is called.
    """

    def __init__(self, url: str | None) -> None:
        self.url = url
        self._pending: asyncio.Task[None] | None = None

    def beat(self) -> None:
        if self.url is not None and (self._pending is None or self._pending.done()):
            self._pending = asyncio.create_task(self._call(self.url))

    async def close(self) -> None:
        """Wait for the last call."""
        if self._pending is not None:
            await self._pending

    async def _call(self, url: str) -> None:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session,
                session.get(url) as answer,
            ):
                answer.raise_for_status()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            get_logger().warning(f"The heartbeat {url} failed: {str(error) or type(error).__name__}")
