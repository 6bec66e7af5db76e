"""Bounds the number of open connections, and the time that a new one may take to send a request."""

from __future__ import annotations

import asyncio
from itertools import islice

from uvicorn.protocols.http.h11_impl import H11Protocol

from prime_rl.inference.limits import HEAD_TIMEOUT_S

_NUM_CANDIDATES = 32


class BoundedConnection(H11Protocol):
    """uvicorn's HTTP/1.1 connection, which makes way for others while it is idle.

    uvicorn has no timeout for a connection that never sends a request. If `limit_concurrency` connections are open,
    it answers every request with 503, even if all the others are idle.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if self.limit_concurrency is not None and len(self.connections) + 1 >= self.limit_concurrency:
            self._close_an_idle_one()
        super().connection_made(transport)
        self._idle_since_s = self.loop.time()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._close_if_unused)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._idle_since_s = self.loop.time()
        super().on_response_complete()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being received or answered, so that closing the connection loses none."""
        return self.cycle is None or self.cycle.response_complete

    def _close_if_unused(self) -> None:
        if self.cycle is None:
            self.transport.close()

    def _close_an_idle_one(self) -> None:
        """Close the longest idle among a few connections. Comparing all would take longer than a request."""
        idle = (one for one in self.connections if isinstance(one, BoundedConnection) and one.is_idle)
        if oldest := min(islice(idle, _NUM_CANDIDATES), key=lambda one: one._idle_since_s, default=None):
            self.connections.discard(oldest)
            oldest.transport.close()
