"""Launches one RL run on a shared machine: `rl_local(config)`, or `python -m … @ rl.toml`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from medarc_rl.launchers.batch_job import in_batch_job
from medarc_rl.launchers.shared_node import shared_node
from prime_rl.configs.rl import RLConfig
from prime_rl.launch.commands import RL
from prime_rl.launch.nodes.placing import slurm_cluster
from prime_rl.launch.placement import Sharing
from prime_rl.launch.run import launch
from prime_rl.utils.pydantic_config import parse_argv_or_exit
from prime_rl.utils.signals import start_program
from prime_rl.watch.screens import rl_screen


def rl_local(
    config: RLConfig,
    bin_dir: Path | None = None,
    sharing: Sharing | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    """Run inference server, orchestrator and trainer to their common end and return the exit code.

    They get free ports and the GPUs of `sharing`. Faults are printed to stderr. Call it in the main thread, because it
    handles signals.

    Args:
        config: a resolved config, with the GPU counts in `deployment`.
        bin_dir: where the engine's programs are, by default the directory of this interpreter.
        sharing: by default, exactly the visible GPUs, for both sides if `MEDARC_SINGLE_GPU` is 1, as in a job.
        on_ready: see `launch`.

    Returns:
        0 if orchestrator and trainer both succeed; 2 if the run cannot be started here; 128 + n after signal n;
        otherwise 1.
    """
    sharing = sharing or shared_node(os.environ, exact_gpus=True)
    return launch(RL, config, rl_screen, sharing, bin_dir, slurm_cluster(os.environ), on_ready)


def main() -> None:
    start_program(launches=True)
    config = parse_argv_or_exit(RLConfig)
    raise SystemExit(in_batch_job(lambda: rl_local(config)))


if __name__ == "__main__":
    main()
