"""The `rl` command: inference server, orchestrator and trainer on this machine, from one config.

It takes the first visible GPUs and the ports in the config. On a node that others use, `medarc_train rl` also chooses
free ports.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from prime_rl.configs.rl import RLConfig
from prime_rl.entrypoints.submission import start
from prime_rl.launch.commands import RL
from prime_rl.launch.nodes.placing import slurm_cluster
from prime_rl.launch.restarting import until_done
from prime_rl.launch.run import launch
from prime_rl.utils.signals import start_program
from prime_rl.watch.screens import rl_screen


def main() -> None:
    """`rl @ rl.toml`. Exits with 0 if orchestrator and trainer both succeed, or after a dry run."""
    start_program(launches=True)
    raise SystemExit(until_done(partial(start, RLConfig, run), lambda line: sys.stderr.write(f"warning: {line}\n")))


def run(config: RLConfig, bin_dir: Path | None = None) -> int:
    """Run `config` to its end and return the exit code. Programs are taken from `bin_dir` if it is given."""
    return launch(RL, config, rl_screen, bin_dir=bin_dir, cluster=slurm_cluster(os.environ))


if __name__ == "__main__":
    main()
