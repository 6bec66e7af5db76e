"""Signal handling and process exit within a time limit, even if environment code leaves threads running."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from prime_rl.run.process import report_completion
from prime_rl.utils.logger import get_logger

EXIT_GRACE_S = 10.0
"""Time for the interpreter to exit after all work is done."""
STOP_GRACE_S = 20.0
"""Time from the first signal to a forced exit."""


@dataclass(slots=True)
class StopSignals:
    """Cancels a task on SIGTERM or SIGINT. A second signal ends the process immediately."""

    received: int | None = None

    def watch(self, task: asyncio.Task[Any]) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, number, task)

    @property
    def exit_code(self) -> int:
        return 128 + (self.received or 0)

    def _stop(self, number: int, task: asyncio.Task[Any]) -> None:
        if self.received is not None:
            os._exit(self.exit_code)
        self.received = number
        get_logger().info(f"{signal.Signals(number).name}: stopping")
        exit_within(STOP_GRACE_S, self.exit_code)
        task.cancel()


@dataclass(frozen=True, slots=True)
class Ending:
    """Ends a process that runs environment code on its event loop."""

    explain: Callable[[Exception | SystemExit], int]
    """Logs why the work failed, and returns the exit code."""
    finish: Callable[[int], None]
    """Called with the exit code when all work is done."""

    def run(self, work: Callable[[asyncio.Runner], int]) -> int:
        """Run `work`, and return its exit code.

        Closing an event loop waits without limit for threads and tasks that environment code left on it. So everything
        that matters happens before.
        """
        with asyncio.Runner() as runner:
            try:
                exit_code = work(runner)
            except (Exception, SystemExit) as failure:  # noqa: BLE001 - `explain` logs it
                exit_code = self.explain(failure)
            self.finish(exit_code)
        return exit_code


def end_reported(exit_code: int) -> None:
    """`finish` of a separate process: report success to the launcher, and bound the time until the process ends."""
    if exit_code == 0:
        report_completion()
    exit_within(EXIT_GRACE_S, exit_code)


def explained_exit_code(exit_: SystemExit) -> int:
    """The exit code after something called `sys.exit` before the work was done.

    Returns 1 and logs the place of the call, unless it was one of our signal handlers.
    """
    if isinstance(exit_.code, int) and exit_.code > 128:
        return exit_.code
    get_logger().error(f"Something called sys.exit({exit_.code!r}) before the work was done", exc_info=exit_)
    return 1


def exit_process(exit_code: int) -> NoReturn:
    """Exit within `EXIT_GRACE_S`."""
    exit_within(EXIT_GRACE_S, exit_code)
    # Without this, the final garbage collection of what verifiers imports takes seconds.
    gc.freeze()
    sys.exit(exit_code)


def exit_within(grace_s: float, exit_code: int) -> None:
    """Force the process to exit with this code if it still runs after `grace_s`."""
    timer = threading.Timer(grace_s, os._exit, (exit_code,))
    timer.daemon = True
    timer.start()
