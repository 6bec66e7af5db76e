"""Reserves TCP ports, and the place where ranks meet, for the duration of a launch."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from prime_rl.utils.private import runtime_directory


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[tuple[int, ...]]:
    """Hold free TCP ports until the block ends; a child can still bind them.

    A socket that is bound but does not listen holds each port. The kernel then never hands it out as a free port to
    any user, and does not use it for outgoing connections, so two launches cannot collide. A server that binds this
    port with SO_REUSEADDR, as uvicorn and vLLM do, still gets it.
    """
    with contextlib.ExitStack() as held:
        yield tuple(held.enter_context(_bound_socket()).getsockname()[1] for _ in range(count))


@contextlib.contextmanager
def meeting_place() -> Iterator[Path]:
    """A path for the file through which ranks on this machine find each other; its directory is this user's alone.

    A TCP store would accept connections from any user of the machine.

    Raises:
        NotPrivate: the directory for such files does not belong to this user alone.
    """
    directory = runtime_directory() / f"ranks-{secrets.token_hex(8)}"
    directory.mkdir(mode=0o700)
    try:
        yield directory / "store"
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # a rank that is being killed may still write


def _bound_socket() -> socket.socket:
    # Both families at once: torch's store listens on the IPv6 wildcard, the inference server on 127.0.0.1.
    if socket.has_dualstack_ipv6():
        bound = socket.socket(socket.AF_INET6)
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        bound = socket.socket(socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("", 0))
    return bound
