"""Started by `test_ranks_of_a_launch.py` as one rank: joins the others, prints where it listens, and waits for them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from prime_rl.trainer.process.errors import exit_on_error, leaving_at_once
from prime_rl.trainer.process.world import setup_world
from prime_rl.utils.logger import setup_logger

LISTENS = "0A"
"""State of a listening socket in `/proc/net/tcp`."""


def listening_addresses() -> set[str]:
    """Addresses that this process listens on, in the kernel's hexadecimal form."""
    targets = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    inodes = {target.removeprefix("socket:[").removesuffix("]") for target in targets}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


setup_logger("warning", None)
with leaving_at_once(), exit_on_error():
    process = setup_world("cpu", timeout_s=3600)
    total = torch.ones(1)
    dist.all_reduce(total)
    os.write(sys.stdout.fileno(), f"rank {process.rank} of {int(total)} on {sorted(listening_addresses())}\n".encode())
    # The test kills one rank; the other one must notice.
    if process.rank == 0:
        dist.all_reduce(total)
    sys.stdin.read()
