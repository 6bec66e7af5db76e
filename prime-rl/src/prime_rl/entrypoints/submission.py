"""How `sft` and `rl` start: here, or as the batch job that `[slurm]` asks for, which `medarc_slurm` makes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from prime_rl.configs.areal import RecoverConfig
from prime_rl.launch.restarting import launcher_fault
from prime_rl.utils.pydantic_config import parse_argv_or_exit

if TYPE_CHECKING:
    from prime_rl.configs.rl import RLConfig
    from prime_rl.configs.sft import SFTConfig

ConfigT = TypeVar("ConfigT", bound="SFTConfig | RLConfig")

PROGRAM = "medarc_slurm"
_JOB_VARIABLE = "SLURM_JOB_ID"


def start(config_cls: type[ConfigT], run: Callable[[ConfigT], int], more: Sequence[str]) -> tuple[int, RecoverConfig]:
    """Run or submit the config of this process's arguments and `more`.

    Returns the exit code, and what to do after a failure.
    """
    words = sys.argv[1:]
    config = parse_argv_or_exit(config_cls, argv=[*words, *more])
    if fault := launcher_fault(config, "local", words):
        sys.stderr.write(f"error: {fault}\n")
        return 2, config.recover
    if (command := submission(config, words, os.environ)) is not None:
        return submit(command), config.recover
    return run(config), config.recover


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
    counts = ((option, getattr(config.deployment, key)) for option, key in zip(options, keys, strict=False))
    # No GPUs for inference: `medarc_slurm` says what a config without a server of its own needs.
    return [word for option, count in counts if count for word in (option, str(count))]


def submit(command: list[str]) -> int:
    """Become the program that submits. Returns only if it is not installed: 2."""
    program = shutil.which(PROGRAM, path=str(Path(sys.executable).parent)) or shutil.which(PROGRAM)
    if program is not None:
        sys.stdout.flush()
        os.execv(program, command)
    sys.stderr.write(f"error: [slurm] asks for a submission by {PROGRAM}, which is not installed: leave it out\n")
    return 2
