"""Ports of this machine that nobody else is given while a launch lasts."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[tuple[int, ...]]:
    """Free TCP ports, held until the block ends, that a child can still bind.

    Each is held by a socket that is bound but does not listen. The kernel gives such a port to nobody who asks for any
    free one, whichever user asks, and does not use it for outgoing connections; so two launches cannot meet. A server
    that asks for this very port with SO_REUSEADDR, as uvicorn, vLLM and torch's store do, gets it all the same.
    """
    with contextlib.ExitStack() as held:
        yield tuple(held.enter_context(_bound_socket()).getsockname()[1] for _ in range(count))


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
