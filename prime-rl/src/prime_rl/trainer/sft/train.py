"""Entry point of the SFT trainer: `python -m prime_rl.trainer.sft.train @ sft.toml`, once per process."""

from __future__ import annotations

import sys
from typing import cast

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.surface.not_built import refuse_unbuilt
from prime_rl.configs.surface.root import taken_from
from prime_rl.run.process import end_with_launch, report_completion
from prime_rl.trainer.process.errors import leaving_at_once
from prime_rl.utils.imports import bound_kernel_caches, import_transformers, import_without_gc
from prime_rl.utils.pydantic_config import parse_argv_or_exit
from prime_rl.utils.signals import start_program, write_stacks_on_signal


def main() -> None:
    """Load the config and train. Exit codes: 0 done (or `dry_run`), 1 failed, 2 bad config, 143 stopped by a signal."""
    end_with_launch()
    start_program()
    write_stacks_on_signal()
    argv = sys.argv[1:]
    config = cast("SFTConfig", parse_argv_or_exit(taken_from(argv), argv=argv))
    refuse_unbuilt(config)
    if config.dry_run:
        return
    with leaving_at_once():
        # Imported here because it loads torch and Transformers: mistakes in the config are reported before that.
        bound_kernel_caches()
        with import_without_gc():
            import_transformers()
            from prime_rl.trainer.sft.run import run

        exit_code = run(config)
        if exit_code == 0:
            report_completion()
        raise SystemExit(exit_code)


if __name__ == "__main__":
    main()
