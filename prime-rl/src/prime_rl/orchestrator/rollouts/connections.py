"""The connections of this process to inference servers. Each is an open file, so their total number is limited."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

from prime_rl.orchestrator.servers.discovery import ServerNames
from prime_rl.utils.limits import allow_connections

KEEPALIVE_S = 4.0
"""Less than the 5 s after which uvicorn closes an idle connection, so that no request uses a closing one."""

MAX_CONNECTIONS = 8000
"""To one server; further calls wait here instead of in the server's queue. Our server has 8,192, and needs some for
health checks and updates. Linux gives out every second one of its 28,232 ports first: with more than 14,116 connections
to one address it searches thousands of ports for each new one, which takes 1.1 to 1.5 ms instead of 0.01."""
SHARES = 4
"""One server gets no more than this part of all connections. Where the system allows few, a server has few too, and
several processes may call it."""


class Connections:
    """The connector that all channels of an event loop share. It is open while at least one channel uses it."""

    def __init__(self, total: int, keepalive_s: float = KEEPALIVE_S) -> None:
        self.total = total
        self._keepalive_s = keepalive_s
        self._room = asyncio.Semaphore(total)
        self._connector: _Connector | None = None
        self._users = 0

    @classmethod
    def of_this_loop(cls) -> Connections:
        """The connections for all channels of the running event loop: as many as this process may open."""
        by_loop = _by_loop()
        for ended in [loop for loop in by_loop if loop.is_closed()]:
            del by_loop[ended]
        loop = asyncio.get_running_loop()
        if loop not in by_loop:
            by_loop[loop] = cls(allow_connections(SHARES * MAX_CONNECTIONS))
        return by_loop[loop]

    def limit_calls(self, most: int | None = None) -> CallLimit:
        """Limits the calls to one server: at most `most` at once, by default one server's share of all connections."""
        return CallLimit(asyncio.Semaphore(most or max(1, self.total // SHARES)), self._room)

    def enter(self) -> aiohttp.TCPConnector:
        """The connector, for one more channel. `leave` ends its use."""
        if self._connector is None:
            self._connector = _Connector(self.total, self._keepalive_s)
        self._users += 1
        return self._connector

    async def leave(self) -> None:
        self._users -= 1
        if not self._users and self._connector is not None:
            connector, self._connector = self._connector, None
            await connector.close()


@functools.cache
def _by_loop() -> dict[asyncio.AbstractEventLoop, Connections]:
    return {}


class CallLimit:
    """A call to a server enters this first. It waits until the server and this process may have one more connection.

    aiohttp can make calls wait too, but counts the wait as part of a call's time: a call would fail because others take
    long.
    """

    def __init__(self, to_server: asyncio.Semaphore, to_all: asyncio.Semaphore) -> None:
        self._to_server = to_server
        self._to_all = to_all

    async def __aenter__(self) -> None:
        await self._to_server.acquire()
        try:
            await self._to_all.acquire()
        except asyncio.CancelledError:
            self._to_server.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._to_all.release()
        self._to_server.release()


class _Connector(aiohttp.TCPConnector):
    """Closes idle connections to other servers before it opens one that would be too many.

    aiohttp's limit is on connections in use. Those that it keeps for later calls, to as many servers as there are, are
    open files too.
    """

    def __init__(self, total: int, keepalive_s: float) -> None:
        super().__init__(limit=0, keepalive_timeout=keepalive_s, resolver=ServerNames())
        self._total = total

    async def _create_connection(self, *args: Any) -> ResponseHandler:
        # The new connection is among those that are in use.
        while self._conns and len(self._acquired) + sum(map(len, self._conns.values())) > self._total:
            key = min(self._conns, key=lambda each: self._conns[each][0][1])
            idle, _ = self._conns[key].popleft()
            if not self._conns[key]:
                del self._conns[key]
            idle.close()
        # aiohttp closes others too, which were idle for too long. Their files are closed in the loop's next iteration.
        await asyncio.sleep(0)
        return await super()._create_connection(*args)
