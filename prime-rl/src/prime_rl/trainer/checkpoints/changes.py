"""Refuses or reports a config that differs from the one of the resumed checkpoint."""

from __future__ import annotations

from prime_rl.run.checkpoints import Changes
from prime_rl.trainer.process.errors import ResumeRefused
from prime_rl.trainer.process.world import Process
from prime_rl.utils.logger import get_logger


def check_changes(changes: Changes, process: Process) -> None:
    """Log which changed keys are applied and which have no effect.

    Raises:
        ResumeRefused: a key changed that makes the run no continuation, with one line for each such key.
    """
    if faults := list(changes.faults()):
        raise ResumeRefused("\n".join(faults))
    if process.is_main:
        for line in changes.lines():
            get_logger().info(line)
