"""Limits how often something starts."""

from __future__ import annotations

import asyncio
from collections import deque


class RateLimit:
    """At most `most` starts within any `period_s` seconds, in the order in which they were asked for."""

    def __init__(self, most: int, period_s: float = 60.0) -> None:
        self.most = most
        self._period_s = period_s
        self._starts: deque[float] = deque()
        """Times of the starts of the last period, on the event loop's clock."""
        self._turn = asyncio.Lock()

    async def acquire(self) -> None:
        """Wait until one more may start, and count it. A cancelled wait counts as none."""
        clock = asyncio.get_running_loop().time
        async with self._turn:
            if len(self._starts) >= self.most:
                await asyncio.sleep(self._starts[-self.most] + self._period_s - clock())
            self._starts.append(clock())
            while self._starts[0] <= self._starts[-1] - self._period_s:
                self._starts.popleft()
