"""The environment `textarena`: games of TextArena. The model has one seat.

[[orchestrator.env]]
id = "textarena"
args = { game = "TicTacToe-v0", opponent = "random" }
"""

from __future__ import annotations

from typing import Any

import verifiers as vf

from prime_rl.environments.adapters.local_games import local_environment
from prime_rl.environments.adapters.options import read_textarena_config


def load_environment(**args: Any) -> vf.Environment:
    """Load the environment. `args` are those of `TextArenaConfig`.

    Raises:
        ConfigError: the arguments have faults.
        GameFault: the package is missing, or the game cannot be used.
    """
    config = read_textarena_config(args)
    return local_environment("textarena", __name__, config, config.unfinished_reward)
