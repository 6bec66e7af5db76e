"""Makes attempts with one agent or workflow. Needs Python 3.11, and `openai` if the agent takes a client."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from prime_rl.environments.agents.attempting import HUNG_THREADS, Attempts
from prime_rl.environments.agents.context import Attempt
from prime_rl.environments.agents.targets import BadTarget, load_target, needs_client
from prime_rl.orchestrator.workers.inside.judge_arguments import NoJudge, offered_arguments
from prime_rl.orchestrator.workers.inside.serving import Ending, Unusable


class Served:
    """Makes attempts."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        """Raises Unusable if the agent cannot be loaded."""
        # An agent is found where the run starts.
        given = start["attributes"]["path"]
        sys.path[:] = [*given, *(place for place in sys.path if place not in given)]
        try:
            offered = partial(offered_arguments, start["judge"], repr(start["module"]))
            target = load_target(start["module"], start["args"], offered)
        except (BadTarget, NoJudge) as error:
            raise Unusable(str(error)) from error
        if needs_client(target) and importlib.util.find_spec("openai") is None:
            raise Unusable(
                "it needs the package openai to call the model, and its interpreter does not have it: install it there"
            )
        self._attempts = Attempts(target)

    async def attempt(
        self, row: Mapping[str, Any], session: Mapping[str, Any], task_id: str, is_eval: bool
    ) -> dict[str, Any]:
        """One attempt at a row. See `Attempts.make`."""
        return await self._attempts.make(row, session, Attempt(task_id, is_eval))

    def ping(self) -> None:
        """Answers while the agent's code does not block the process."""

    def after_answer(self) -> None:
        """Raises Ending once too many threads of plain functions did not end in time: they cannot be stopped."""
        if self._attempts.hung_threads >= HUNG_THREADS:
            raise Ending(f"{HUNG_THREADS} threads of the agent did not end in time; its process starts again")

    async def close(self) -> None:
        """Nothing outlives the process."""
