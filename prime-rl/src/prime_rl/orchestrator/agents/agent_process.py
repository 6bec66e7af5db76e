"""The process in which an agent's code runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prime_rl.orchestrator.guests.guest_process import Guest, GuestError, GuestProcess
from prime_rl.orchestrator.guests.restarting import BLOCKED_S, GuestEnded, RestartingGuest

HOST = ("-m", "prime_rl.orchestrator.agents.host")
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
        self._guest = RestartingGuest(GuestProcess.start(guest))

    async def attempt(self, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Make one attempt. See `Attempts.make`.

        Raises:
            AgentFailed: the process ended, or does not answer.
            EnvironmentFault: it ends whenever it is started.
        """
        try:
            value: dict[str, Any] = await self._guest.ask("attempt", timeout_s + BLOCKED_S, **arguments)
        except (GuestEnded, GuestError) as error:
            raise AgentFailed(str(error)) from error
        return value

    async def close(self) -> None:
        await self._guest.close()

    def kill(self) -> None:
        self._guest.kill()
