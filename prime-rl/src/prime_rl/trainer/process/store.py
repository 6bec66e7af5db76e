"""The store through which ranks find each other before they join the process group."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

_BACKLOG = 1024


def open_store(environ: Mapping[str, str], rank: int, world_size: int, timeout: timedelta) -> dist.Store | None:
    """Open the store for `init_process_group`; None lets torch open its own, as under torchrun or on several nodes.

    One process needs no network. For ranks on one machine rank 0 listens on loopback, where torch's own store would
    listen on every interface of the machine.
    """
    if world_size == 1:
        return dist.HashStore()
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if "TORCHELASTIC_RUN_ID" in environ or not _is_loopback(host):
        return None
    if rank != 0:
        return dist.TCPStore(host, int(port), world_size, is_master=False, timeout=timeout)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, int(port)))
        listening.listen(_BACKLOG)
        # The store closes the socket.
        descriptor = listening.detach()
    return dist.TCPStore(host, int(port), world_size, is_master=True, timeout=timeout, master_listen_fd=descriptor)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False
