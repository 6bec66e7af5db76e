"""`[slurm]` in a config of `sft` or `rl` asks for a batch job, which `medarc_slurm` makes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prime_rl.configs.rl import RLConfig
    from prime_rl.configs.sft import SFTConfig

PROGRAM = "medarc_slurm"
_JOB_VARIABLE = "SLURM_JOB_ID"


def submission(config: SFTConfig | RLConfig, words: Sequence[str], env: Mapping[str, str]) -> list[str] | None:
    """The command that submits a run, for its command line `words`. None: the run starts here.

    A config for several nodes always has `[slurm]`. In a job, it starts there.
    """
    if config.slurm is None or (config.deployment.type == "multi_node" and _JOB_VARIABLE in env):
        return None
    return [PROGRAM, config.component, *_size(config), *words]


def _size(config: SFTConfig | RLConfig) -> list[str]:
    """The options for what `deployment` says. Without them, `medarc_slurm rl` takes a GPU for each side."""
    sizes = {
        ("rl", "single_node"): ("num_train_gpus", "num_infer_gpus"),
        ("rl", "multi_node"): ("gpus_per_node", "gpus_per_node", "num_train_nodes", "num_infer_nodes"),
    }
    keys = sizes.get((config.component, config.deployment.type), ())
    options = ("--train-gpus", "--infer-gpus", "--train-nodes", "--infer-nodes")
    pairs = zip(options, keys, strict=False)
    return [word for option, key in pairs for word in (option, str(getattr(config.deployment, key)))]


def submit(command: list[str]) -> int:
    """Become the program that submits. Returns only if it is not installed: 2."""
    program = shutil.which(PROGRAM, path=str(Path(sys.executable).parent)) or shutil.which(PROGRAM)
    if program is not None:
        sys.stdout.flush()
        os.execv(program, command)
    sys.stderr.write(f"error: [slurm] asks for a submission by {PROGRAM}, which is not installed: leave it out\n")
    return 2
