"""The store through which ranks find each other before they join the process group."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from prime_rl.run.paths import STORE_VARIABLE
from prime_rl.trainer.process.errors import RendezvousError
from prime_rl.transport.weights import tcp_store


def open_store(environ: Mapping[str, str], world_size: int, timeout: timedelta) -> dist.Store | None:
    """Open the store for `init_process_group`; None lets torch open its own, as under torchrun.

    One process needs no network. Ranks of one launch meet in a file that only their user can read, because torch's own
    store listens on every interface of the machine and trusts all who connect. Nodes that share no file which they can
    lock meet at a TCP store, which listens on the address of the cluster alone.

    Raises:
        RendezvousError: this process cannot listen at its address, for instance because the port is taken.
    """
    if world_size == 1:
        return dist.HashStore()
    place = environ.get(STORE_VARIABLE)
    if place is None:
        return None
    if place.startswith("tcp://"):
        host, _, port = place.removeprefix("tcp://").rpartition(":")
        try:
            return tcp_store(host, int(port), is_master=environ["RANK"] == "0", timeout=timeout)
        except OSError as error:
            # torch's own store raises a DistError instead.
            raise RendezvousError(
                f"rank 0 cannot listen for the other ranks at {host}:{port}: {error.strerror}; start the run again"
            ) from error
    # A person who copies the commands of a dry run needs the directory, too.
    Path(place).parent.mkdir(mode=0o700, exist_ok=True)
    return dist.FileStore(place, world_size)
