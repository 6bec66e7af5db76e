"""Signals to a running trainer: SIGTERM saves and stops, SIGUSR1 saves a checkpoint now."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from prime_rl.trainer.process.world import Process

EXIT_STOPPED = 143
"""Exit code of a run that SIGTERM ended, as a shell reports it."""


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
        """Whether this process received SIGTERM. Other processes may not know yet."""
        return self._stop

    def take(self) -> Requests:
        """The signals that any process received, the same on all processes. Collective.

        Schedulers signal processes one by one, and saving a checkpoint needs all of them.
        """
        stop, save = self._stop, self._save
        if self.process.world_size > 1:
            flags = torch.tensor([stop, save], dtype=torch.int32, device=self.process.device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            stop, save = (bool(flag) for flag in flags.tolist())
        self._save = False
        return Requests(stop, save)

    def _on_stop(self, number: int, frame: object) -> None:
        self._stop = True

    def _on_save(self, number: int, frame: object) -> None:
        self._save = True


@contextmanager
def listen_for_signals(process: Process) -> Iterator[SignalBox]:
    """Collect SIGTERM and SIGUSR1 during the block. Outside it SIGTERM ends the process at once.

    After a first SIGTERM, later ones are ignored even after the block: launchers, torchrun and Slurm each forward the
    signal, and a late copy must not kill a process that is already exiting.
    """
    box = SignalBox(process)
    previous = signal.signal(signal.SIGTERM, box._on_stop), signal.signal(signal.SIGUSR1, box._on_save)
    try:
        yield box
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if box._stop else previous[0])
        signal.signal(signal.SIGUSR1, previous[1])
