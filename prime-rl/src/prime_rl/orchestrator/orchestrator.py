"""Entry point `orchestrator`: rollouts from the inference servers become training batches for the trainer.

Nothing heavy is imported before the config has been checked and stale files are gone.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.surface.not_built import refuse_unbuilt
from prime_rl.monitors import MonitorError
from prime_rl.orchestrator.ckpt import Checkpoints, remove_offers, remove_stale
from prime_rl.orchestrator.errors import OrchestratorError, TooManyFailures
from prime_rl.orchestrator.stopping import leave
from prime_rl.run.directory import OutputDirInUse, check_output_dir
from prime_rl.run.paths import OrchestratorPaths, RunPaths
from prime_rl.utils.imports import import_without_gc
from prime_rl.utils.logger import get_logger, setup_logger
from prime_rl.utils.pydantic_config import dump_toml, parse_argv_or_exit

if TYPE_CHECKING:
    from prime_rl.orchestrator.steps import Sleep


def main() -> None:
    # Until the event loop takes over, there is nothing to save.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: sys.exit(128 + received))
    config = parse_argv_or_exit(OrchestratorConfig)
    refuse_unbuilt(config)
    paths = OrchestratorPaths(config.output_dir)
    setup_logger(config.log.level, paths.log if config.log.file else None, config.log.json_logging)
    leave(run(config, paths))


def run(config: OrchestratorConfig, paths: OrchestratorPaths, sleep: Sleep = asyncio.sleep) -> int:
    """Run the orchestrator; the exit code. A foreseen failure is one log line, any other comes with its traceback.

    `sleep` waits between batches that had nothing to train on.
    """
    try:
        resume_step = prepare_directory(config, paths)
        # verifiers takes seconds to import.
        with import_without_gc():
            from prime_rl.orchestrator.run import run_orchestrator

        return run_orchestrator(config, resume_step, sleep)
    except TooManyFailures as failure:
        # The author of an environment needs to see where its code failed.
        cause = failure.__cause__
        get_logger().error(str(failure), exc_info=None if isinstance(cause, OrchestratorError) else cause)
        return 1
    except (OrchestratorError, MonitorError, OutputDirInUse) as failure:
        get_logger().error(str(failure))
        return 1
    except Exception:  # noqa: BLE001 - the process's last handler
        get_logger().error("The orchestrator failed", exc_info=True)
        return 1


def prepare_directory(config: OrchestratorConfig, paths: OrchestratorPaths) -> int | None:
    """Write the resolved config and remove what is stale; the step to resume from, or None for a fresh start.

    Raises:
        OutputDirInUse: the directory holds the checkpoints of another run.
        ResumeFault: the step to resume from has no part of the orchestrator.
    """
    run_paths = RunPaths.from_orchestrator_dir(config.output_dir)
    wanted = config.ckpt.resume_step if config.ckpt else None
    check_output_dir(run_paths, resuming=wanted is not None)
    resume_step = Checkpoints(run_paths, paths).resolve(wanted)
    remove_stale(paths, resume_step or 0)
    if config.weight_broadcast.type == "filesystem":
        remove_offers(paths)
    paths.control.mkdir(parents=True, exist_ok=True)
    dump_toml(config, paths.resolved_config)
    return resume_step
