"""Starts a run again after a failure, as `recover` says, and refuses a `launcher` that the command is not."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

from prime_rl.configs.areal import LaunchedConfig, Launcher, RecoverConfig
from prime_rl.launch.host import noted_signals

FAILED = 1
"""Exit code of a run that failed. A fault of the config (2) or a signal (128 + n) would only happen again."""
NEXT_START = ("--resume=auto", "--no-clean-output-dir")
"""Options of a start after a failure."""
_COMMANDS: Mapping[Launcher, str] = {
    "local": "medarc_train {kind} {words}",
    "ray": "medarc_submit {kind} {words} --to ray",
    "slurm": "medarc_slurm {kind} {words}",
}


def launcher_fault(config: LaunchedConfig, here: Launcher, words: Sequence[str]) -> str | None:
    """Why a command of `here` does not start the config, with the command that does."""
    wanted = config.launcher
    if wanted is None or wanted == here:
        return None
    command = _COMMANDS[wanted].format(kind=config.component, words=shlex.join(words))
    return f"launcher = {wanted!r}: start this run with `{command}`, or leave launcher out"


def until_done(start: Callable[[Sequence[str]], tuple[int, RecoverConfig]], say: Callable[[str], object]) -> int:
    """Start a run, and again after a failure as often as its config says. Returns the last exit code.

    `start` takes more words for the command line, and returns the exit code and the config's `recover`.
    """
    with noted_signals() as asked_to_stop:
        code, recover = start(())
        for number in range(1, recover.starts_again + 1):
            if code != FAILED:
                break
            # The run had failed already, so that its exit code does not tell.
            if asked_to_stop:
                say(f"recover.mode = {recover.mode!r}: not starting again after {asked_to_stop[-1].name}")
                break
            say(f"recover.mode = {recover.mode!r}: starting again, {number} of {recover.retries}")
            code, _ = start(NEXT_START)
        return code
