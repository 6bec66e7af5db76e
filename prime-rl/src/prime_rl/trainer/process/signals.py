"""What a running trainer can be told from outside: SIGTERM (save and stop) and SIGUSR1 (checkpoint now)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from prime_rl.trainer.process.world import World

EXIT_STOPPED = 143
"""Exit code of a run that SIGTERM ended, as the shell would report the signal."""


@dataclass(frozen=True, slots=True)
class Requests:
    """What has been asked for since the last look."""

    stop: bool
    """Save a checkpoint and leave the loop."""
    save: bool
    """Save a checkpoint and go on."""


class SignalBox:
    """Collects signals until the loop asks for them between two steps."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._stop = False
        self._save = False

    @property
    def stop_asked(self) -> bool:
        """Whether this process was told to stop, which the others may not know yet."""
        return self._stop

    def take(self) -> Requests:
        """The requests that any process received; all processes get the same answer, so this is a collective call.

        Schedulers signal processes one by one, and a checkpoint needs all of them.
        """
        requests = self._stop, self._save
        if self.world.world_size > 1:
            flags = torch.tensor(requests, dtype=torch.int32, device=self.world.device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            requests = tuple(bool(flag) for flag in flags.tolist())
        self._save = False
        return Requests(*requests)

    def _on_stop(self, number: int, frame: object) -> None:
        self._stop = True

    def _on_save(self, number: int, frame: object) -> None:
        self._save = True


@contextmanager
def listen_for_signals(world: World) -> Iterator[SignalBox]:
    """Collect SIGTERM and SIGUSR1 during the block. Before and after it SIGTERM ends the process at once.

    A process that has been told to stop is not told again: launchers, torchrun and Slurm each pass the signal on, and
    a late copy of it must not kill a process that is about to leave by itself.
    """
    box = SignalBox(world)
    previous = signal.signal(signal.SIGTERM, box._on_stop), signal.signal(signal.SIGUSR1, box._on_save)
    try:
        yield box
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if box._stop else previous[0])
        signal.signal(signal.SIGUSR1, previous[1])
