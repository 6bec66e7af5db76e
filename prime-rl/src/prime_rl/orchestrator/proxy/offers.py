"""Sessions that agents in foreign processes start: each is one attempt that the run waits for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prime_rl.orchestrator.proxy.recording import Session


@dataclass(slots=True, eq=False)
class Offer:
    """An attempt that waits for an agent."""

    session: Session
    task: Mapping[str, Any]
    """The row of the dataset."""
    ended: asyncio.Future[None]
    is_taken: bool = field(default=False)


class Offers:
    """Attempts that wait for an agent, first come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[Offer] = deque()
        self._by_session: dict[str, Offer] = {}
        self._added = asyncio.Condition()
        self.num_started = 0
        """Attempts that an agent has taken, since the beginning."""

    def __len__(self) -> int:
        """Attempts that no agent has taken."""
        return len(self._waiting)

    async def run(self, session: Session, task: Mapping[str, Any]) -> None:
        """Offer an attempt until an agent ends it. Cancelling it withdraws the offer."""
        offer = Offer(session, task, asyncio.get_running_loop().create_future())
        self._by_session[session.key] = offer
        async with self._added:
            self._waiting.append(offer)
            self._added.notify()
        try:
            await offer.ended
        finally:
            del self._by_session[session.key]
            if not offer.is_taken:
                self._waiting.remove(offer)

    async def take(self, wait_s: float) -> Offer | None:
        """The attempt that has waited longest; None if there is none within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s), self._added:
                await self._added.wait_for(lambda: bool(self._waiting))
                offer = self._waiting.popleft()
                offer.is_taken = True
                self.num_started += 1
                return offer
        except TimeoutError:
            return None

    def end(self, session: Session) -> None:
        """The agent of a session is done. Does nothing for sessions that were not offered."""
        offer = self._by_session.get(session.key)
        if offer is not None and not offer.ended.done():
            offer.ended.set_result(None)
