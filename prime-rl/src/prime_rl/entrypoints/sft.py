"""The `sft` command: the SFT trainer on this machine, one process per GPU."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from prime_rl.configs.sft import SFTConfig
from prime_rl.entrypoints.submission import start
from prime_rl.launch.commands import SFT
from prime_rl.launch.nodes.placing import slurm_cluster
from prime_rl.launch.placement import Sharing
from prime_rl.launch.restarting import until_done
from prime_rl.launch.run import launch
from prime_rl.utils.signals import start_program
from prime_rl.watch.screens import sft_screen


def main() -> None:
    """`sft @ sft.toml`. Exits with 0 if training succeeds, or after a dry run."""
    start_program(launches=True)
    raise SystemExit(until_done(partial(start, SFTConfig, run), lambda line: sys.stderr.write(f"warning: {line}\n")))


def run(config: SFTConfig, bin_dir: Path | None = None) -> int:
    """Train to the end and return the exit code. Programs are taken from `bin_dir` if it is given."""
    return launch(SFT, config, sft_screen, Sharing(free_ports=True), bin_dir, slurm_cluster(os.environ))


if __name__ == "__main__":
    main()
