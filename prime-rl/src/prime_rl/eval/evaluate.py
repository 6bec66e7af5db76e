"""The evaluator's process: `python -m prime_rl.eval.evaluate @ eval.toml`, started by the `eval` command.

Exit status: 0 if every candidate was evaluated completely; 1 if something failed, after all the rest was done; 128 + n
after signal n.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.monitors.trace import own_trace
from prime_rl.orchestrator.errors import OrchestratorError
from prime_rl.orchestrator.stopping import EXIT_GRACE_S, Ending, end_reported, exit_within, explained_exit_code
from prime_rl.run.evaluations import Candidate, candidates_of
from prime_rl.run.process import end_with_launch
from prime_rl.utils.errors import PrimeError
from prime_rl.utils.files import disk_fault
from prime_rl.utils.imports import import_verifiers, import_without_gc
from prime_rl.utils.logger import get_logger, setup_logger
from prime_rl.utils.pydantic_config import parse_argv_or_exit
from prime_rl.utils.signals import start_program, write_stacks_on_signal


def main() -> None:
    """Evaluate, print the table, and exit."""
    end_with_launch()
    start_program()
    write_stacks_on_signal()
    config = parse_argv_or_exit(OfflineEvalConfig)
    setup_logger(config.log.level, None, config.log.json_logging)
    own_trace()
    # Until the event loop handles signals.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, frame: sys.exit(128 + received))
    try:
        exit_code = _evaluate(config, candidates_of(config))
    except (Exception, SystemExit) as failure:  # noqa: BLE001 - the process's last handler
        exit_code = _explained(failure)
    exit_within(EXIT_GRACE_S, exit_code)
    raise SystemExit(exit_code)


def _explained(failure: Exception | SystemExit) -> int:
    """Log why the evaluation failed, and return the exit code."""
    if isinstance(failure, SystemExit):
        return explained_exit_code(failure)
    if isinstance(failure, OrchestratorError | PrimeError):
        get_logger().error(str(failure))
    else:
        fault = disk_fault(failure)
        get_logger().error(fault or "The evaluation failed", exc_info=None if fault else failure)
    return 1


def _evaluate(config: OfflineEvalConfig, candidates: Sequence[Candidate]) -> int:
    # verifiers takes seconds to import.
    with import_without_gc():
        import_verifiers()
        from prime_rl.eval.run import run_evaluation

    return run_evaluation(config, candidates, Ending(_explained, end_reported))


if __name__ == "__main__":
    main()
