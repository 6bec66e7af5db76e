"""Started by `test_processes_of_a_run.py` with two processes. Rank 1 asks rank 0, which waits for it, for a checkpoint.

Each rank prints whether either of two calls of `take` has the request.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from prime_rl.trainer.process.signals import listen_for_signals
from prime_rl.trainer.process.world import destroy_world, setup_world


def is_waiting(pid: int) -> bool:
    """Whether the main thread of a process sleeps."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("S")


process = setup_world("cpu", timeout_s=3600)
pid_of_main = torch.tensor(os.getpid())
with listen_for_signals(process) as signals:
    dist.broadcast(pid_of_main, src=0)
    if not process.is_main:
        while not is_waiting(int(pid_of_main)):
            continue
        os.kill(int(pid_of_main), signal.SIGUSR1)
    saves = [signals.take().save, signals.take().save]
os.write(sys.stdout.fileno(), f"rank {process.rank} saves: {any(saves)}\n".encode())
destroy_world()
