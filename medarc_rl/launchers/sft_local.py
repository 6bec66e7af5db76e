"""Launches one run of SFT, preferences or a reward model on a shared machine: `sft_local(config)`, or `python -m …
[dpo|rm] @ trainer.toml`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

from medarc_rl.launchers.batch_job import in_batch_job
from medarc_rl.launchers.shared_node import shared_node
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.surface.root import taken_from
from prime_rl.launch.commands import TRAININGS
from prime_rl.launch.nodes.placing import slurm_cluster
from prime_rl.launch.run import launch
from prime_rl.utils.pydantic_config import parse_argv_or_exit
from prime_rl.utils.signals import start_program
from prime_rl.watch.screens import sft_screen


def sft_local(config: SFTConfig, bin_dir: Path | None = None, on_ready: Callable[[], None] = lambda: None) -> int:
    """Run the ranks of the trainer to their common end and return the exit code, as `rl_local` does."""
    command, sharing = TRAININGS[config.component], shared_node(os.environ)
    return launch(command, config, sft_screen, sharing, bin_dir, slurm_cluster(os.environ), on_ready)


def main() -> None:
    start_program(launches=True)
    argv = sys.argv[1:]
    config = cast("SFTConfig", parse_argv_or_exit(taken_from(argv), argv=argv))
    raise SystemExit(in_batch_job(lambda: sft_local(config)))


if __name__ == "__main__":
    main()
