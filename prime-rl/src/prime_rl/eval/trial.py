"""Tries the environments of an evaluation: `python -m prime_rl.eval.trial @ eval.toml`. A dry run starts it."""

from __future__ import annotations

import sys

from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.utils.images import ImageLimits
from prime_rl.utils.imports import import_verifiers, import_without_gc
from prime_rl.utils.logger import setup_logger
from prime_rl.utils.pydantic_config import parse_argv_or_exit
from prime_rl.utils.signals import start_program


def main() -> None:
    """Load the environments. Exit codes: 0 they can be used, 1 one cannot, 2 bad config."""
    start_program()
    config = parse_argv_or_exit(OfflineEvalConfig)
    setup_logger("warning")
    # verifiers takes seconds to import.
    with import_without_gc():
        import_verifiers()
        from prime_rl.environments.judging.gateway import offered_in_a_trial
        from prime_rl.orchestrator.evaluator import EvalSet
        from prime_rl.orchestrator.workers.loading import load_environments

    try:
        with offered_in_a_trial(config.judge):
            environments = load_environments(config.environments, config.log, "env", "eval")
        for each in config.environments:
            environment = environments[each.name or each.id]
            environment.image_limits = ImageLimits()
            environment.check_images()
            EvalSet.from_config(each, environment)
            environment.prompt(0)
    except EnvironmentFault as fault:
        sys.stderr.write(f"error: {fault}\n")
        raise SystemExit(1) from fault


if __name__ == "__main__":
    main()
