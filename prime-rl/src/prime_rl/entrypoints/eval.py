"""The `eval` command: a base model and its checkpoints on verifiers environments.

It starts a server on a free port, unless `client.base_url` names a running one.
"""

from __future__ import annotations

from pathlib import Path

from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.launch.commands import EVAL
from prime_rl.launch.placement import Sharing
from prime_rl.launch.run import launch
from prime_rl.utils.pydantic_config import parse_argv_or_exit
from prime_rl.utils.signals import start_program
from prime_rl.watch.screens import eval_screen


def main() -> None:
    """`eval @ eval.toml`. Exits with 0 if every candidate was evaluated completely."""
    start_program(launches=True)
    raise SystemExit(run(parse_argv_or_exit(OfflineEvalConfig)))


def run(config: OfflineEvalConfig, bin_dir: Path | None = None) -> int:
    """Evaluate, print the table, and return the exit code. Programs are taken from `bin_dir` if it is given."""
    return launch(EVAL, config, eval_screen, Sharing(free_ports=True), bin_dir)


if __name__ == "__main__":
    main()
