"""The process of an environment or of an agent, started again when its code ends or blocks it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prime_rl.orchestrator.errors import EnvironmentFault, GroupFailed
from prime_rl.orchestrator.guests.guest_process import Guest, GuestProcess
from prime_rl.utils.logger import get_logger

BLOCKED_S = 30.0
"""Seconds after the end of a time limit in which a process must answer. One that does not is blocked by its code."""
MAX_ENDS_IN_A_ROW = 5
"""Ends of the process without an answer between them, after which its code counts as broken."""


class GuestEnded(GroupFailed):
    """The process ended or did not answer. Its requests fail; later ones get a new process."""


class RestartingGuest:
    """Asks a process that is replaced when it is gone."""

    def __init__(self, process: GuestProcess) -> None:
        self.guest: Guest = process.guest
        self.blocked_s = BLOCKED_S
        self._process: GuestProcess | None = process
        self._starting = asyncio.Lock()
        # Not the event loop's own threads: environment code can keep all of those. It lives as long as this object,
        # because a guest dies with the thread that started it.
        self._thread = ThreadPoolExecutor(1, "guest")
        self._ends_in_a_row = 0

    async def ask(self, do: str, limit_s: float | None = None, **arguments: Any) -> Any:
        """The answer to one request. `limit_s` is a time after which the process counts as blocked.

        Raises:
            GuestError: the code failed.
            GuestEnded: the process ended, or does not answer within `limit_s`.
            EnvironmentFault: it ends whenever it is started.
        """
        process = await self._running()
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                value = await process.ask(do, **arguments)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._lost(process, f"it blocks its process: no answer within {limit_s:g} s", "Blocked") from error
        except EnvironmentFault as error:
            raise self._lost(process, str(error), "EnvironmentEnded") from error
        self._ends_in_a_row = 0
        return value

    async def _running(self) -> GuestProcess:
        async with self._starting:
            if self._process is None:
                if self._ends_in_a_row >= MAX_ENDS_IN_A_ROW:
                    raise EnvironmentFault(
                        f"{self.guest.place}: the process of {self.guest.module!r} ended {self._ends_in_a_row} times "
                        "in a row before it answered anything; what it printed is in this log"
                    )
                loop = asyncio.get_running_loop()
                self._process = await loop.run_in_executor(self._thread, GuestProcess.start, self.guest)
            return self._process

    def _lost(self, process: GuestProcess, why: str, reason: str) -> GuestEnded:
        """The first request that notices ends the process, and alone counts against the environment."""
        is_first = process is self._process
        if is_first:
            self._process = None
            self._ends_in_a_row += 1
            get_logger().warning(f"The process of {self.guest.module!r} is gone or blocked, and starts again")
            process.kill()
        return GuestEnded(why, reason, is_of_environment=is_first)

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
