"""The commands `medarc_train sft`, `rl` and `eval`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from medarc_rl.cli import warn
from medarc_rl.launchers.options import EvalOptions, RlOptions, SftOptions

if TYPE_CHECKING:
    from prime_rl.configs.areal.launched import RecoverConfig


OptionsT = TypeVar("OptionsT", SftOptions, RlOptions)


def sft(words: list[str], options: SftOptions) -> int:
    """Run supervised fine-tuning."""
    from medarc_rl.running import run_sft

    return _until_done(run_sft, words, options)


def rl(words: list[str], options: RlOptions) -> int:
    """Run reinforcement learning: inference server, orchestrator and trainer."""
    from medarc_rl.running import run_rl

    return _until_done(run_rl, words, options)


def evaluate(words: list[str], options: EvalOptions) -> int:
    """Evaluate a model and its checkpoints. Starts its own server unless client.base_url names one."""
    from medarc_rl.running import run_eval

    return run_eval(words, options)


def _until_done(
    run: Callable[[list[str], OptionsT], tuple[int, RecoverConfig]], words: list[str], options: OptionsT
) -> int:
    """Run, and again after a failure as often as the config's `recover` says."""
    from prime_rl.launch.restarting import until_done

    def start(more: Sequence[str]) -> tuple[int, RecoverConfig]:
        # The words of a later start say how to resume.
        return run([*words, *more], replace(options, resume=None)) if more else run(words, options)

    return until_done(start, warn)
