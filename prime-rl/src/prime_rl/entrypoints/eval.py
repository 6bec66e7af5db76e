"""The `eval` command: a base model and its checkpoints on verifiers environments.

Exit status: 0 when every candidate was evaluated in full; 1 when something failed, after everything else was done; 2
for a config that it cannot honour; 128 + n after signal n.

Nothing heavy is imported before the config has been checked.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Any

from prime_rl.checks import refuse_unstartable
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.surface.not_built import refuse_unbuilt
from prime_rl.eval.candidates import Candidate, find_candidates
from prime_rl.eval.errors import EvalError, MissingSteps, OtherEvaluation
from prime_rl.eval.settings import check_settings, save_settings
from prime_rl.launch import CannotStart, LocalHost
from prime_rl.launch.devices import DeviceError
from prime_rl.orchestrator.errors import OrchestratorError
from prime_rl.orchestrator.stopping import EXIT_GRACE_S, exit_within
from prime_rl.run.directory import write_configs
from prime_rl.run.paths import EvalPaths, RunPaths
from prime_rl.utils.imports import importing
from prime_rl.utils.logger import get_logger, setup_logger
from prime_rl.utils.pydantic_config import parse_argv_or_exit


def main() -> None:
    """`eval @ eval.toml`."""
    config = parse_argv_or_exit(OfflineEvalConfig)
    refuse_unbuilt(config)
    refuse_unstartable(config)
    exit_code = run(config)
    exit_within(EXIT_GRACE_S, exit_code)
    raise SystemExit(exit_code)


def run(config: OfflineEvalConfig) -> int:
    """Evaluate, print the table, and return the exit code."""
    run_paths, eval_paths = RunPaths(config.output_dir), EvalPaths(config.output_dir)
    try:
        candidates = find_candidates(config.eval_base, config.weights_dir, config.steps)
        settings = check_settings(eval_paths, settings_of(config))
    except (MissingSteps, OtherEvaluation) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sections = {"eval": config} if config.inference is None else {"eval": config, "inference": config.inference}
    write_configs(run_paths, sections)
    if config.dry_run:
        return 0
    save_settings(eval_paths, settings)
    setup_logger(config.log.level, run_paths.log("eval") if config.log.file else None, config.log.json_logging)
    return _evaluate(config, candidates)


def settings_of(config: OfflineEvalConfig) -> dict[str, Any]:
    """What results depend on, besides how many there are."""
    described = {"id", "args", "extra_env_kwargs"}
    return {
        "model": config.model.name,
        "weights_dir": None if config.weights_dir is None else str(config.weights_dir.resolve()),
        "sampling": config.sampling.model_dump(),
        "environments": {env.name or env.id: env.model_dump(include=described) for env in config.environments},
    }


def _evaluate(config: OfflineEvalConfig, candidates: Sequence[Candidate]) -> int:
    try:
        with LocalHost() as host:
            # Until the event loop takes over. Leaving the block ends the server.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, lambda received, frame: sys.exit(128 + received))
            # verifiers takes seconds to import.
            with importing():
                from prime_rl.eval.run import start

            return start(config, candidates, host)
    except (EvalError, OrchestratorError, DeviceError, CannotStart) as failure:
        get_logger().error(str(failure))
        return 1


if __name__ == "__main__":
    main()
