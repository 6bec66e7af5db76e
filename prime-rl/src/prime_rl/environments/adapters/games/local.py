"""Environments whose games run on this machine."""

from __future__ import annotations

from collections.abc import Sequence

import verifiers as vf

from prime_rl.environments.adapters.games.game_options import GameConfig
from prime_rl.environments.adapters.games.playing import PlayedEnvironment, Rules
from prime_rl.environments.adapters.games.processes import GameProcesses, made_rows
from prime_rl.environments.adapters.games.turns import GameFault
from prime_rl.environments.adapters.options import missing_package
from prime_rl.utils.logger import get_logger

_MOST_NAMED = 50


def local_environment(kind: str, module: str, config: GameConfig, unfinished_reward: float = 0.0) -> vf.Environment:
    """The environment of a game. `module` is the one whose package is needed.

    Raises:
        GameFault: the package is missing, or the game cannot be used.
    """
    if (fault := missing_package(module)) is not None:
        raise GameFault(fault)
    settings = {"kind": kind, **config.model_dump(mode="json")}
    made = made_rows(settings)
    title = settings["game"]
    if not made["repeats"]:
        get_logger().warning(f"{title} starts differently with the same seed: rollouts of a group do not start alike")
    processes = GameProcesses(settings)
    system = _instruction(title, made["about"]["actions"]) if config.system_prompt is None else config.system_prompt
    rules = Rules(title, system, config.max_turns, unfinished_reward, processes.open, processes.close)
    return PlayedEnvironment(rules, made["train"], made["eval"])


def _instruction(title: str, actions: Sequence[str]) -> str:
    """How to answer. Games of TextArena, and text actions, explain themselves."""
    if not actions:
        return ""
    shown = [*actions[:_MOST_NAMED], "…"] if len(actions) > _MOST_NAMED else list(actions)
    return f"You act in {title}. Each message shows what you observe. Answer with one action: {', '.join(shown)}."
