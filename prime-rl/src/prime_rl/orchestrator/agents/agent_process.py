"""The process in which an agent's code runs, started again when the code ends or blocks it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.guests.guest_process import Guest, GuestError, GuestProcess
from prime_rl.utils.logger import get_logger

HOST = ("-m", "prime_rl.orchestrator.agents.host")
BLOCKED_S = 30.0
"""Seconds after the end of a session in which its process must say so. One that does not is blocked by the agent."""
MAX_ENDS_IN_A_ROW = 5
"""Ends of the process without an attempt between them, after which the agent counts as broken."""
_QUIET = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "OPENAI_AGENTS_DONT_LOG_MODEL_DATA": "1"}
"""Agents send no traces, unless they ask for it themselves."""


def agent_guest(place: str, target: str, args: Mapping[str, Any]) -> Guest:
    """What to start. `place` is the config key, for messages."""
    path = [str(Path.cwd()), *(entry for entry in sys.path if entry)]
    attributes = {"path": path}
    return Guest(place, Path(sys.executable), target, args, attributes, program=HOST, added=_QUIET)


class AgentFailed(Exception):
    """The process of an agent ended or did not answer. Its attempts fail; later ones get a new process."""


class AgentProcess:
    """Runs attempts in a process that is replaced when it is gone."""

    def __init__(self, guest: Guest) -> None:
        """Raises EnvironmentFault if the agent does not load."""
        self.guest = guest
        self._process: GuestProcess | None = GuestProcess.start(guest)
        self._starting = asyncio.Lock()
        self._ends_in_a_row = 0

    async def attempt(self, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Make one attempt. See `Attempts.make`.

        Raises:
            AgentFailed: the process ended, or does not answer.
            EnvironmentFault: it ends whenever it is started.
        """
        process = await self._running()
        try:
            async with asyncio.timeout(timeout_s + BLOCKED_S):
                value: dict[str, Any] = await process.ask("attempt", **arguments)
        except TimeoutError as error:
            self._lose(process)
            raise AgentFailed(f"the agent blocks its process: no answer within {timeout_s + BLOCKED_S:g} s") from error
        except EnvironmentFault as error:
            self._lose(process)
            raise AgentFailed(str(error)) from error
        except GuestError as error:
            raise AgentFailed(str(error)) from error
        self._ends_in_a_row = 0
        return value

    async def _running(self) -> GuestProcess:
        async with self._starting:
            if self._process is None:
                if self._ends_in_a_row >= MAX_ENDS_IN_A_ROW:
                    raise EnvironmentFault(
                        f"{self.guest.place}: the process of {self.guest.module!r} ended {self._ends_in_a_row} times "
                        "in a row before any attempt did; what it printed is in this log"
                    )
                # The thread outlives this call, as the process requires of the thread that starts it.
                self._process = await asyncio.to_thread(GuestProcess.start, self.guest)
            return self._process

    def _lose(self, process: GuestProcess) -> None:
        """The first attempt that notices ends the process; the others get the same error."""
        if process is self._process:
            self._process = None
            self._ends_in_a_row += 1
            get_logger().warning(f"The process of {self.guest.module!r} is gone or blocked, and starts again")
            process.kill()

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
