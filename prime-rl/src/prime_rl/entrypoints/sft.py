"""The `sft` command: the SFT trainer on this machine, one process per GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from prime_rl.configs.areal.launched import RecoverConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.entrypoints.submission import submission, submit
from prime_rl.launch.commands import SFT
from prime_rl.launch.nodes.srun import slurm_cluster
from prime_rl.launch.restarts.restarting import launcher_fault, until_done
from prime_rl.launch.run import launch
from prime_rl.launch.site import Sharing
from prime_rl.utils.interrupts import end_quietly_on_ctrl_c
from prime_rl.utils.pydantic_config import parse_argv_or_exit
from prime_rl.watch.screens import sft_screen


def main() -> None:
    """`sft @ sft.toml`. Exits with 0 if training succeeds, or after a dry run."""
    end_quietly_on_ctrl_c()
    raise SystemExit(until_done(start, lambda line: sys.stderr.write(f"warning: {line}\n")))


def start(more: Sequence[str]) -> tuple[int, RecoverConfig]:
    """Run the config of this process's arguments and `more`. Returns the exit code, and what to do after a failure."""
    config = parse_argv_or_exit(SFTConfig, argv=[*sys.argv[1:], *more])
    if fault := launcher_fault(config, "local", sys.argv[1:]):
        sys.stderr.write(f"error: {fault}\n")
        return 2, config.recover
    if (command := submission(config, sys.argv[1:], os.environ)) is not None:
        return submit(command), config.recover
    return run(config), config.recover


def run(config: SFTConfig, bin_dir: Path | None = None) -> int:
    """Train to the end and return the exit code. Programs are taken from `bin_dir` if it is given."""
    return launch(SFT, config, sft_screen, Sharing(free_ports=True), bin_dir, slurm_cluster(os.environ))
