"""Looks up addresses of inference servers: of a host, or all behind a DNS name (a headless Kubernetes service)."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from aiohttp.abc import AbstractResolver, ResolveResult

from prime_rl.utils.errors import RunError

LOOKUPS_AT_ONCE = 4
NO_SUCH_NAME = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})
"""Errors that mean that the name has no address, as a service without a ready pod."""


class LookupFault(RunError):
    """The lookup failed, so nothing is known about the name."""


class Resolver(Protocol):
    """Finds the IP addresses of a name."""

    async def addresses(self, hostname: str) -> frozenset[str]:
        """All addresses of `hostname`; empty if it has none.

        Raises:
            LookupFault: the lookup failed.
        """
        ...


class SystemLookups:
    """Asks the operating system: `/etc/hosts`, then DNS.

    Uses separate threads, because environment code can occupy all threads of the event loop.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LOOKUPS_AT_ONCE, "lookups")

    async def find(self, hostname: str, port: int | None, **options: Any) -> list[tuple[Any, ...]]:
        """Call `socket.getaddrinfo`."""
        look_up = partial(socket.getaddrinfo, hostname, port, type=socket.SOCK_STREAM, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, look_up)


class ServerNames(AbstractResolver):
    """Finds the hosts of HTTP servers for aiohttp."""

    def __init__(self) -> None:
        self._lookups = SystemLookups()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._lookups.find(host, port, family=family, flags=socket.AI_ADDRCONFIG)
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(hostname=host, host=address[0], port=port, family=of_family, proto=proto, flags=numeric)
            for of_family, _, proto, _, address in found
        ]

    async def close(self) -> None:
        """Do nothing: the threads end with this object."""


class SystemResolver:
    """Finds all addresses of a name."""

    def __init__(self) -> None:
        self._lookups = SystemLookups()

    async def addresses(self, hostname: str) -> frozenset[str]:
        try:
            found = await self._lookups.find(hostname, None)
        except socket.gaierror as error:
            if error.errno in NO_SUCH_NAME:
                return frozenset()
            raise LookupFault(f"{hostname!r} cannot be looked up: {error.strerror}") from error
        by_family = {
            wanted: frozenset(str(address[0]) for family, *_, address in found if family == wanted)
            for wanted in (socket.AF_INET, socket.AF_INET6)
        }
        # A pod of a dual-stack cluster has an address of each family, and must count once.
        return by_family[socket.AF_INET] or by_family[socket.AF_INET6]


def server_url(address: str, port: int) -> str:
    """URL of the OpenAI routes of a server at an IP address."""
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}/v1"
