"""A network of a given speed between processes of one Linux machine. Needs root and `ip` and `tc` of iproute2.

The process that makes it has a network card of its own, and so has each node: a network namespace, joined to the others
by a bridge. Every card sends and receives at most so many bits a second.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_SUBNET = "10.78.0"
_MAKER = 254
_BURST = "2mb"


@dataclass(frozen=True, slots=True)
class LimitedNetwork:
    """`address` and `interface` are those of the process that made it."""

    address: str
    interface: str
    nodes: tuple[str, ...]

    def command(self, node: int, *argv: str) -> list[str]:
        """The command that runs `argv` on a node, by index."""
        return ["ip", "netns", "exec", self.nodes[node], "env", f"GLOO_SOCKET_IFNAME={_card(node + 1)}", *argv]


@contextmanager
def limited_network(nodes: int, gigabits_per_s: float) -> Iterator[LimitedNetwork]:
    """Raises CalledProcessError: this user may not make it."""
    bridge = f"b{os.getpid()}"
    names = tuple(f"node{os.getpid()}-{node}" for node in range(nodes))
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for number, name in enumerate((None, *names)):
            _join(bridge, name, number, gigabits_per_s)
        yield LimitedNetwork(f"{_SUBNET}.{_MAKER}", _card(0), names)
    finally:
        for argv in (["link", "del", _card(0)], ["link", "del", bridge], *(["netns", "del", name] for name in names)):
            subprocess.run(["ip", *argv], check=False, capture_output=True)


def _join(bridge: str, namespace: str | None, number: int, gigabits_per_s: float) -> None:
    """Give a namespace, or with None this process, a card on the bridge."""
    card, port = _card(number), f"{_card(number)}p"
    inside: list[str] = []
    _ip("link", "add", card, "type", "veth", "peer", "name", port)
    if namespace is not None:
        _ip("netns", "add", namespace)
        _ip("link", "set", card, "netns", namespace)
        inside = ["-n", namespace]
        _ip(*inside, "link", "set", "lo", "up")
    _ip("link", "set", port, "master", bridge, "up")
    _ip(*inside, "addr", "add", f"{_SUBNET}.{number or _MAKER}/24", "dev", card)
    _ip(*inside, "link", "set", card, "up")
    for where, device in ((inside, card), ([], port)):
        limit = ("rate", f"{gigabits_per_s}gbit", "burst", _BURST, "latency", "50ms")
        subprocess.run(["tc", *where, "qdisc", "add", "dev", device, "root", "tbf", *limit], check=True)


def _card(number: int) -> str:
    return f"v{os.getpid()}n{number}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, stdout=subprocess.DEVNULL)
