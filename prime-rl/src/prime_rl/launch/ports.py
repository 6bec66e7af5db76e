"""Reserves TCP ports for the duration of a launch."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[tuple[int, ...]]:
    """Hold free TCP ports until the block ends; a child can still bind them.

    A socket that is bound but does not listen holds each port. The kernel then never hands it out as a free port to
    any user, and does not use it for outgoing connections, so two launches cannot collide. A server that binds this
    port with SO_REUSEADDR, as uvicorn and vLLM do, still gets it.
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
