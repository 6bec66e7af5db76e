"""One life of an environment's server: from its start until its process ends, with the groups that it has."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from prime_rl.orchestrator.errors import GroupFailed
from prime_rl.orchestrator.servers.server import unless

T = TypeVar("T")


class ServerLife:
    """Fails the groups of a server whose process ends: verifiers' client would send them to the next one, again and
    again if one of them ends it."""

    def __init__(self) -> None:
        self._has_ended = False
        self._ends: set[asyncio.Event] = set()
        """One for each group that it has, so that groups may be of different event loops."""
        self._has_answered = False
        self._why = ""
        self._is_counted = False

    async def of(self, group: Coroutine[Any, Any, T]) -> T:
        """The result of a group. Raises GroupFailed if the server ends before; only the first one counts against the
        environment."""
        ended = asyncio.Event()
        if self._has_ended:
            ended.set()
        self._ends.add(ended)
        try:
            outputs = await unless(ended, group)
        except Exception:
            self._has_answered = True
            raise
        finally:
            self._ends.discard(ended)
        if outputs is None:
            if not ended.is_set():
                raise asyncio.CancelledError  # by the environment's own code
            is_first, self._is_counted = not self._is_counted, True
            raise GroupFailed(self._why, "EnvironmentEnded", is_of_environment=is_first)
        self._has_answered = True
        return outputs

    def end(self, why: str) -> bool:
        """Fail its groups. Returns whether it had answered any before."""
        self._why = why
        self._has_ended = True
        for ended in self._ends:
            ended.set()
        return self._has_answered


class ServerLives:
    """The lives of a server, one after another. All environments that send it groups share them."""

    def __init__(self) -> None:
        self._current = ServerLife()

    async def of(self, group: Coroutine[Any, Any, T]) -> T:
        return await self._current.of(group)

    def end(self, why: str) -> bool:
        life, self._current = self._current, ServerLife()
        return life.end(why)
