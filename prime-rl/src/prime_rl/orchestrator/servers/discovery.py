"""Looks up the addresses of inference servers under a DNS name, such as a headless Kubernetes service."""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

NO_SUCH_NAME = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})
"""Errors that are answers: the name does not exist, or has no address. A service without a ready pod gives either."""


class LookupFault(Exception):
    """No name server answered, so nothing is known about the name."""


class Resolver(Protocol):
    """Finds the IP addresses of a name."""

    async def addresses(self, hostname: str) -> frozenset[str]:
        """All addresses of `hostname`; empty if it has none.

        Raises:
            LookupFault: the lookup failed.
        """
        ...


class SystemResolver:
    """Asks the operating system: `/etc/hosts`, then DNS."""

    async def addresses(self, hostname: str) -> frozenset[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in NO_SUCH_NAME:
                return frozenset()
            raise LookupFault(f"{hostname!r} cannot be looked up: {error.strerror}") from error
        by_family = {
            wanted: frozenset(str(address[0]) for family, *_, address in found if family == wanted)
            for wanted in (socket.AF_INET, socket.AF_INET6)
        }
        # A pod of a dual-stack cluster has an address of each kind, and must not count twice.
        return by_family[socket.AF_INET] or by_family[socket.AF_INET6]


def server_url(address: str, port: int) -> str:
    """URL of the OpenAI routes of a server at an IP address."""
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}/v1"
