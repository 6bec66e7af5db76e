"""Entry point `orchestrator`: collects rollouts from the inference servers and sends batches to the trainer.

Slow imports come after the config has been checked and stale files are deleted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.surface.not_built import refuse_unbuilt
from prime_rl.monitors.trace import own_trace
from prime_rl.orchestrator.ckpt import Checkpoints, remove_empty_broadcasts, remove_stale
from prime_rl.orchestrator.errors import OrchestratorError, TooManyFailures
from prime_rl.orchestrator.stopping import Ending, end_reported, exit_process, explained_exit_code
from prime_rl.run.directory import check_output_dir
from prime_rl.run.paths import OrchestratorPaths, RunPaths
from prime_rl.run.process import end_with_launch
from prime_rl.utils.errors import PrimeError
from prime_rl.utils.files import disk_fault
from prime_rl.utils.imports import import_verifiers, import_without_gc
from prime_rl.utils.limits import keep_threads_to_quota
from prime_rl.utils.logger import get_logger, setup_logger
from prime_rl.utils.pydantic_config import dump_toml, parse_argv_or_exit
from prime_rl.utils.signals import write_stacks_on_signal
from prime_rl.utils.terminal import write_text_only

if TYPE_CHECKING:
    from prime_rl.orchestrator.steps import Sleep


def main() -> None:
    write_text_only()
    keep_threads_to_quota(os.environ)
    write_stacks_on_signal()
    end_with_launch()
    # Exit at once: there is nothing to save until the event loop installs its own handlers.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: sys.exit(128 + received))
    config = parse_argv_or_exit(OrchestratorConfig)
    refuse_unbuilt(config)
    paths = OrchestratorPaths(config.output_dir)
    setup_logger(config.log.level, paths.log if config.log.file else None, config.log.json_logging)
    own_trace()
    exit_process(run(config, paths, finish=end_reported))


def run(
    config: OrchestratorConfig,
    paths: OrchestratorPaths,
    sleep: Sleep = asyncio.sleep,
    finish: Callable[[int], None] = lambda exit_code: None,
) -> int:
    """Run the orchestrator and return the exit code. Logs expected errors in one line, others with a traceback.

    `sleep` is called between batches without a token to train on; `finish` as in `Ending`.
    """
    try:
        resume_step = prepare_directory(config, paths)
        # verifiers takes seconds to import.
        with import_without_gc():
            import_verifiers()
            from prime_rl.orchestrator.run import run_orchestrator

        return run_orchestrator(config, resume_step, sleep, Ending(_explained, finish))
    except (Exception, SystemExit) as failure:  # noqa: BLE001 - the process's last handler
        return _explained(failure)


def _explained(failure: Exception | SystemExit) -> int:
    """Log why the process failed, and return its exit code."""
    if isinstance(failure, SystemExit):
        return explained_exit_code(failure)
    if isinstance(failure, TooManyFailures):
        # The author of an environment needs to see where its code failed.
        cause = failure.__cause__
        get_logger().error(str(failure), exc_info=None if isinstance(cause, OrchestratorError) else cause)
    elif isinstance(failure, OrchestratorError | PrimeError):
        get_logger().error(str(failure))
    else:
        fault = disk_fault(failure)
        get_logger().error(fault or "The orchestrator failed", exc_info=None if fault else failure)
    return 1


def prepare_directory(config: OrchestratorConfig, paths: OrchestratorPaths) -> int | None:
    """Delete stale files, write the resolved config, and return the step to resume from (None: fresh start).

    Raises:
        RunDirError: the directory holds the checkpoints of another run.
        OrchestratorError: the orchestrator has no checkpoint of the step to resume from.
    """
    run_paths = RunPaths.from_orchestrator_dir(config.output_dir)
    wanted = config.ckpt.resume_step if config.ckpt else None
    check_output_dir(run_paths, resuming=wanted is not None)
    resume_step = Checkpoints(run_paths, paths).resolve(wanted)
    remove_stale(paths, resume_step or 0)
    run_paths.early_end.unlink(missing_ok=True)  # a launcher has done so
    if config.weight_broadcast.type == "filesystem":
        remove_empty_broadcasts(paths)
    paths.control.mkdir(parents=True, exist_ok=True)
    dump_toml(config, paths.resolved_config)
    return resume_step


if __name__ == "__main__":
    main()
