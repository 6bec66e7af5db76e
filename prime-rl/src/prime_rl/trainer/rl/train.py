"""Entry point of the RL trainer: `trainer @ trainer.toml`, or this module under torchrun."""

from __future__ import annotations

import os
import sys

from prime_rl.configs.surface.not_built import refuse_unbuilt
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.monitors.trace import own_trace
from prime_rl.run.directory import check_output_dir
from prime_rl.run.paths import RunPaths
from prime_rl.run.process import end_with_launch, report_completion
from prime_rl.trainer.process.errors import exit_on_error, leaving_at_once
from prime_rl.utils.errors import RunDirError
from prime_rl.utils.imports import bound_kernel_caches, import_transformers, import_without_gc
from prime_rl.utils.logger import setup_logger
from prime_rl.utils.pydantic_config import parse_argv_or_exit
from prime_rl.utils.signals import start_program, write_stacks_on_signal


def main() -> None:
    """Load the config and train. Exits with status 0 only if the run is complete."""
    end_with_launch()
    start_program()
    write_stacks_on_signal()
    config = parse_argv_or_exit(TrainerConfig)
    refuse_unbuilt(config)
    paths = RunPaths(config.output_dir)
    try:
        check_output_dir(paths, resuming=config.ckpt is not None and config.ckpt.resume_step is not None)
    except RunDirError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
    rank = int(os.environ.get("RANK", 0))
    log_file = paths.rank_log(rank) if config.log.file else None
    setup_logger(config.log.level if rank == 0 else "warning", log_file, config.log.json_logging)
    own_trace()
    with leaving_at_once(), exit_on_error():
        # Imported here so that config errors are reported at once: this loads torch and transformers.
        bound_kernel_caches()
        with import_without_gc():
            import_transformers()
            from prime_rl.trainer.rl.run import train

        train(config, paths)
        report_completion()


if __name__ == "__main__":
    main()
