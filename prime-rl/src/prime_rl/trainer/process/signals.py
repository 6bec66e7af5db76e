"""Signals to a running trainer: SIGTERM and Ctrl-C save and stop, SIGUSR1 saves a checkpoint now."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from prime_rl.trainer.process.world import Process
from prime_rl.utils.files import STABLE
from prime_rl.utils.logger import count_of

EXIT_STOPPED = 143
"""Exit code of a run that a signal ended after a step, as a shell reports SIGTERM."""
EXIT_INTERRUPTED = 130
"""Exit code after a second Ctrl-C."""


def stopped_line(step: int, checkpoint: Path) -> str:
    """The last log line of a run that stopped after `step` steps. `checkpoint` is the directory of that step."""
    when = "before the first step" if step == 0 else f"after {count_of('step', step)}"
    return f"Stopped {when}" + (f"; checkpoint in {checkpoint}" if (checkpoint / STABLE).is_file() else "")


@dataclass(frozen=True, slots=True)
class Requests:
    """Signals received since the last call of `take`."""

    stop: bool
    """Save a checkpoint and leave the loop."""
    save: bool
    """Save a checkpoint and continue."""


class SignalBox:
    """Collects signals until the training loop takes them between two steps."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._stop = False
        self._save = False

    @property
    def stop_asked(self) -> bool:
        """Whether this process received SIGTERM or SIGINT. Other processes may not know yet."""
        return self._stop

    def take(self) -> Requests:
        """The signals that any process received, the same on all processes. Collective.

        Schedulers signal processes one by one, and saving a checkpoint needs all of them.
        """
        # Cleared before the wait for the other processes: a signal that arrives during it is for the next call.
        stop, save, self._save = self._stop, self._save, False
        if self.process.world_size > 1:
            flags = torch.tensor([stop, save], dtype=torch.int32, device=self.process.device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            stop, save = (bool(flag) for flag in flags.tolist())
        return Requests(stop, save)

    def _on_stop(self, number: int, frame: object) -> None:
        self._stop = True

    def _on_interrupt(self, number: int, frame: object) -> None:
        """Answer Ctrl-C at once. Under a launcher only the launcher receives it, and sends SIGTERM."""
        if self._stop:
            os._exit(EXIT_INTERRUPTED)
        self._stop = True
        if self.process.is_main:
            # The log's stream may be in the middle of a line.
            os.write(2, b"\nstopping after this step; press Ctrl-C again to stop now\n")

    def _on_save(self, number: int, frame: object) -> None:
        self._save = True


@contextmanager
def listen_for_signals(process: Process) -> Iterator[SignalBox]:
    """Collect SIGTERM, SIGINT and SIGUSR1 during the block. Outside it SIGTERM ends the process at once.

    After a first SIGTERM, later ones are ignored even after the block: launchers, torchrun and Slurm each forward the
    signal, and a late copy must not kill a process that is already exiting.
    """
    box = SignalBox(process)
    handlers = {signal.SIGTERM: box._on_stop, signal.SIGINT: box._on_interrupt, signal.SIGUSR1: box._on_save}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield box
    finally:
        for number, handler in previous.items():
            is_late_copy = box._stop and number is signal.SIGTERM
            signal.signal(number, signal.SIG_IGN if is_late_copy else handler)
