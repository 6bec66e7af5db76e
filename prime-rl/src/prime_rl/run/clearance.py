"""Keeps an engine from loading its model until the environments of its run have been checked.

The engine's process starts at once, because its imports take as long as those of the environments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from prime_rl.run.beats import own_beats

CLEARANCE_VARIABLE = "ENGINE_WAITS_FOR"
"""Environment variable of a server: the file that appears when it may load its model."""
_LOOK_S = 0.05


def wait_for_clearance(env: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Return when the file that `env` names exists, or at once if it names none. `say` receives a line about a wait.

    There is no time limit: the launcher stops the server if the process that checks the environments ends.
    """
    file = env.get(CLEARANCE_VARIABLE)
    if file is not None and not Path(file).exists():
        _wait(Path(file), say)
    own_beats().say("loading the model")


def _wait(file: Path, say: Callable[[str], None]) -> None:
    own_beats().say("waiting until the environments are checked", waits_for="orchestrator")
    say(f"The model loads when the orchestrator has checked the environments and made {file}")
    while not file.exists():
        time.sleep(_LOOK_S)


def give_clearance(file: Path) -> None:
    """Let the engine load its model."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
