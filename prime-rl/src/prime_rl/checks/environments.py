"""Loads a run's environments in a process of its own, to find what no look at their files shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from prime_rl.utils.gpus import MASK_VARIABLE
from prime_rl.utils.pydantic_config import dump_toml

if TYPE_CHECKING:
    from prime_rl.configs.orchestrator import OrchestratorConfig

EXAMINATION = "prime_rl.orchestrator.env_servers.examination"
_FAULT = "error: "


def trial_faults(config: OrchestratorConfig) -> list[str]:
    """One line for each reason why the environments cannot be used. Takes seconds: they are imported and loaded."""
    with TemporaryDirectory() as scratch:
        file = Path(scratch, "orchestrator.toml")
        dump_toml(config, file)
        done = subprocess.run(
            [sys.executable, "-m", EXAMINATION, "@", str(file)],
            env=os.environ | {MASK_VARIABLE: ""},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode == 0:
        return []
    lines = done.stderr.splitlines()
    faults = [line.removeprefix(_FAULT) for line in lines if line.startswith(_FAULT)]
    end = "ended by a signal" if done.returncode < 0 else f"ended with status {done.returncode}"
    return faults or [f"loading the environments {end}: {(lines or ['without a word'])[-1]}"]
