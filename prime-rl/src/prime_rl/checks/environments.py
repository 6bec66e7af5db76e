"""Tries a run's environments, advantage function and loss in other processes, to find faults that only show when they
are called."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.utils.gpus import MASK_VARIABLE
from prime_rl.utils.pydantic_config import dump_toml
from prime_rl.utils.scratch import scratch_directory

if TYPE_CHECKING:
    from prime_rl.configs.eval import OfflineEvalConfig
    from prime_rl.configs.orchestrator import OrchestratorConfig
    from prime_rl.configs.trainer import TrainerConfig

EXAMINATION = "prime_rl.orchestrator.env_checks.examination"
EVALUATION_TRIAL = "prime_rl.eval.trial"
LOSS_TRIAL = "prime_rl.trainer.rl.loss_trial"
_MODULES = {"orchestrator": EXAMINATION, "eval": EVALUATION_TRIAL, "trainer": LOSS_TRIAL}
_WHAT = {"orchestrator": "loading the environments", "eval": "loading the environments", "trainer": "trying the loss"}
_FAULT = "error: "


@dataclass(frozen=True, slots=True)
class Place:
    """Environment of a trial; by default that of this process."""

    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    directory: Path = Path()


def trial_faults(
    config: OrchestratorConfig | OfflineEvalConfig | TrainerConfig,
    place: Place | None = None,
    limit_s: float | None = None,
) -> list[str]:
    """One line for each reason why the environments and the advantage function, or a custom loss, cannot be used.

    Takes seconds: they are imported, loaded and called. A trial that takes longer than `limit_s`
    seconds is ended, which is a fault, too.
    """
    place, what = place or Place(), _WHAT[config.component]
    with scratch_directory("trial") as scratch:
        file = scratch / f"{config.component}.toml"
        dump_toml(config, file)
        try:
            done = subprocess.run(
                [place.python, "-m", _MODULES[config.component], "@", str(file)],
                env={**place.env, MASK_VARIABLE: ""},
                cwd=place.directory,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return [f"{what} took longer than {limit_s:g} s"]
    if done.returncode == 0:
        return []
    lines = done.stderr.splitlines()
    faults = [line.removeprefix(_FAULT) for line in lines if line.startswith(_FAULT)]
    end = "ended by a signal" if done.returncode < 0 else f"ended with status {done.returncode}"
    return faults or [f"{what} {end}: {(lines or ['no output'])[-1]}"]


def loss_faults(config: TrainerConfig, place: Place | None = None, limit_s: float | None = None) -> list[str]:
    """One line if a custom loss cannot be trained with. Other losses need no trial."""
    return trial_faults(config, place, limit_s) if config.loss.type == "custom" else []
