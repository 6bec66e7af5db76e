"""How the process ends: on a signal, and in bounded time whatever an environment's own code still does."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any, NoReturn

from prime_rl.utils.logger import get_logger

EXIT_GRACE_S = 10.0
"""For the interpreter, once everything is done."""
STOP_GRACE_S = 20.0
"""From a signal to the end of the process."""


@dataclass(slots=True)
class StopSignals:
    """Turns SIGTERM and SIGINT into the cancellation of one task. A second signal ends the process at once."""

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


def leave(exit_code: int) -> NoReturn:
    """End the process, in bounded time.

    Without the freeze the interpreter spends seconds on collecting what verifiers imports.
    """
    exit_within(EXIT_GRACE_S, exit_code)
    gc.freeze()
    sys.exit(exit_code)


def exit_within(grace_s: float, exit_code: int) -> None:
    """End the process with this code after `grace_s`, if it has not ended by then; environments may leave threads."""
    timer = threading.Timer(grace_s, os._exit, (exit_code,))
    timer.daemon = True
    timer.start()
