"""The command `medarc_train passk`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from medarc_rl.cli import warn
from medarc_rl.errors import UsageError

if TYPE_CHECKING:
    from prime_rl.configs.eval import OfflineEvalConfig
    from prime_rl.configs.rollouts.environments import EvalEnvConfig

PASSK = "prime_rl.eval.passk"
TABLE = "pass_rates.jsonl"


@dataclass(frozen=True, kw_only=True)
class PasskOptions:
    output_dir: Annotated[Path | None, Option(help="Directory of the measurement; an earlier one continues.")] = None
    attempts: Annotated[
        int | None, Option(min=1, help="Attempts at each prompt; by default rollouts_per_example of the config.")
    ] = None
    threshold: Annotated[float, Option(help="Minimum reward of a correct answer.")] = 1.0
    step: Annotated[int | None, Option(min=0, help="Weights to count, if those of several steps were measured.")] = None
    env: Annotated[str | None, Option(metavar="NAME", help="Only this environment.")] = None
    table: Annotated[
        Path | None, Option(help=f"Table to write, .jsonl or .csv; by default OUT/{TABLE}.", dir_okay=False)
    ] = None
    curriculum: Annotated[Path | None, Option(help="Curriculum to write: one prompt id per line.", dir_okay=False)] = (
        None
    )
    order: Annotated[Literal["easy", "hard"], Option(help="--curriculum: which prompts come first.")] = "easy"
    min_pass_rate: Annotated[
        float | None, Option(min=0, max=1, help="--curriculum: leave out prompts that are right less often.")
    ] = None
    max_pass_rate: Annotated[
        float | None, Option(min=0, max=1, help="--curriculum: leave out prompts that are right more often.")
    ] = None


def passk(words: list[str], options: PasskOptions) -> int:
    """Measure pass@k of a model on each prompt of its environments, and write a table and a curriculum.

    CONFIG is that of `medarc_train eval`. Started again, it makes only the missing rollouts.
    """
    from medarc_rl.launchers.shared_node import shared_node
    from medarc_rl.utils import GivenConfig, load_run
    from prime_rl.configs.eval import OfflineEvalConfig
    from prime_rl.launch.commands import EVAL
    from prime_rl.launch.run import launch
    from prime_rl.watch.screens import eval_screen

    _refuse_useless(options)
    owned = {} if options.attempts is None else {"rollouts_per_example": [options.attempts]}
    run = load_run(GivenConfig.read(OfflineEvalConfig, words), "passk", options.output_dir, owned)
    code = launch(EVAL, run.config, eval_screen, shared_node(os.environ))
    if run.config.dry_run:
        return code
    if code != 0:
        warn("not all rollouts were made, so no table is written; the same command makes the missing ones")
        return code
    return subprocess.run([sys.executable, "-m", PASSK, json.dumps(_plan(run.config, options))], check=False).returncode


def _refuse_useless(options: PasskOptions) -> None:
    low, high = options.min_pass_rate, options.max_pass_rate
    if low is not None and high is not None and low > high:
        raise UsageError(f"--min-pass-rate {low:g} is above --max-pass-rate {high:g}")
    if options.curriculum is None and (low is not None or high is not None):
        raise UsageError(
            "--min-pass-rate and --max-pass-rate choose the prompts that are written to --curriculum: give that file, "
            "too"
        )


def _plan(config: OfflineEvalConfig, options: PasskOptions) -> dict[str, Any]:
    return {
        "output_dir": str(config.output_dir),
        "table": str(options.table or config.output_dir / TABLE),
        "threshold": options.threshold,
        "step": options.step,
        "env": options.env,
        "asked": {each.name or each.id: _asked(each) for each in config.environments},
        "curriculum": None if options.curriculum is None else str(options.curriculum),
        "order": options.order,
        "min_pass_rate": options.min_pass_rate,
        "max_pass_rate": options.max_pass_rate,
    }


def _asked(env: EvalEnvConfig) -> tuple[int, int | None, int]:
    """First row, end of the rows (None is all), and attempts at each."""
    count, attempts = env.num_examples, env.rollouts_per_example
    assert count is not None  # `OfflineEvalConfig.environments` fills them in
    assert attempts is not None
    return env.skip_first, None if count < 0 else env.skip_first + count, attempts
