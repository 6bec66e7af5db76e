"""The environment `openenv`: an environment on an OpenEnv server.

[[orchestrator.env]]
id = "openenv"
args = { url = "http://localhost:8000" }
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import verifiers as vf

from prime_rl.environments.adapters.games.game_options import OpenEnvConfig
from prime_rl.environments.adapters.games.openenv_client import OpenEnvServer
from prime_rl.environments.adapters.games.playing import PlayedEnvironment, Rules
from prime_rl.environments.adapters.games.turns import GameError, GameFault
from prime_rl.environments.adapters.options import read_openenv_config
from prime_rl.utils.logger import get_logger


def load_environment(**args: Any) -> vf.Environment:
    """Load the environment, and reset it once for each row. `args` are those of `OpenEnvConfig`.

    Raises:
        ConfigError: the arguments have faults.
        GameFault: no such server answers, or its environment cannot be used.
    """
    config = read_openenv_config(args)
    with ThreadPoolExecutor(1) as pool:  # this thread may have an event loop
        server, train, held_out = pool.submit(asyncio.run, _read(config)).result()
    system = server.answers.instruction if config.system_prompt is None else config.system_prompt
    rules = Rules(server.url, system, config.max_turns, 0.0, server.open, lambda: None)
    return PlayedEnvironment(rules, train, held_out)


async def _read(config: OpenEnvConfig) -> tuple[OpenEnvServer, list[dict[str, Any]], list[dict[str, Any]]]:
    server = OpenEnvServer(config)
    await server.read_schema()
    try:
        session = await server.open()
        try:
            train = [await _row(session, config.seed + index) for index in range(config.size)]
            held_out = [await _row(session, config.eval_seed + index) for index in range(config.eval_size)]
            again = await _row(session, config.seed)
        finally:
            await session.close()
    except GameError as error:
        raise GameFault(str(error)) from error
    if again != train[0]:
        get_logger().warning(
            f"the environment at {server.url} starts differently with the same seed: "
            "the rollouts of a group do not start alike"
        )
    fresh = OpenEnvServer(config)  # the event loop of the other one has ended
    fresh.answers = server.answers
    return fresh, train, held_out


async def _row(session: Any, seed: int) -> dict[str, Any]:
    turn = await session.reset(seed, 0)
    if turn.is_over:
        raise GameError(f"the seed {seed} starts an episode that is already over")
    return {"seed": seed, "seat": 0, "begins": True, "text": turn.text}
