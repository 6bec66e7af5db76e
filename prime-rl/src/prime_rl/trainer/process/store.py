"""The store through which ranks find each other before they join the process group."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from prime_rl.run.paths import STORE_VARIABLE


def open_store(environ: Mapping[str, str], world_size: int) -> dist.Store | None:
    """Open the store for `init_process_group`; None lets torch open its own, as under torchrun or on several nodes.

    One process needs no network. Ranks of one launch meet in a file that only their user can read, because torch's own
    store listens on every interface of the machine and trusts all who connect.
    """
    if world_size == 1:
        return dist.HashStore()
    file = environ.get(STORE_VARIABLE)
    if file is None:
        return None
    # A person who copies the commands of a dry run needs the directory, too.
    Path(file).parent.mkdir(mode=0o700, exist_ok=True)
    return dist.FileStore(file, world_size)
