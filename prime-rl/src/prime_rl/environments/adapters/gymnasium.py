"""The environment `gymnasium`: environments of Gymnasium whose observations and actions are text.

[[orchestrator.env]]
id = "gymnasium"
args = { game = "FrozenLake-v1", actions = ["left", "down", "right", "up"], show_render = true }
"""

from __future__ import annotations

from typing import Any

import verifiers as vf

from prime_rl.environments.adapters.local_games import local_environment
from prime_rl.environments.adapters.options import read_gymnasium_config


def load_environment(**args: Any) -> vf.Environment:
    """Load the environment. `args` are those of `GymnasiumConfig`.

    Raises:
        ConfigError: the arguments have faults.
        GameFault: the package is missing, or the game cannot be used.
    """
    return local_environment("gymnasium", __name__, read_gymnasium_config(args))
