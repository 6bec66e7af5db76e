"""The process in which an agent's code runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prime_rl.orchestrator.guests.guest_process import Guest, GuestError, GuestProcess
from prime_rl.orchestrator.guests.restarting import BLOCKED_S, GuestEnded, RestartingGuest

BOOT = Path(__file__).with_name("boot.py")
_QUIET = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "OPENAI_AGENTS_DONT_LOG_MODEL_DATA": "1"}
"""Agents send no traces, unless they ask for it themselves."""


def agent_guest(
    place: str, target: str, args: Mapping[str, Any], python: Path | None = None, judge: str | None = None
) -> Guest:
    """What to start, in the interpreter `python` or in this one. `place` is the config key, for messages."""
    ours = [entry for entry in sys.path if entry] if python is None else []
    attributes = {"path": [str(Path.cwd()), *ours]}
    program = (str(BOOT),)
    return Guest(place, python or Path(sys.executable), target, args, attributes, judge, program=program, added=_QUIET)


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

    async def refuse_blocked(self) -> None:
        """Replace the process if an agent's code blocks it. Raises GuestEnded if it does."""
        await self._guest.ask("ping", self._guest.blocked_s)

    async def close(self) -> None:
        await self._guest.close()

    def kill(self) -> None:
        self._guest.kill()
