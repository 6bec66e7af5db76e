"""Finds TCP sockets of a process and its descendants that other machines can connect to."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path

_LISTENING = "0A"


def open_listeners(pid: int, proc: Path = Path("/proc")) -> list[str]:
    """`ADDRESS:PORT` of each listening socket of the process tree that is not bound to a loopback address."""
    sockets = dict(_listening(proc))
    held = {inode for process in _tree(pid, proc) for inode in _sockets_of(process)}
    return sorted(
        f"{address}:{port}" for inode, (address, port) in sockets.items() if inode in held and not _is_loopback(address)
    )


def _is_loopback(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _listening(proc: Path) -> Iterator[tuple[str, tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]]:
    for name in ("tcp", "tcp6"):
        try:
            rows = (proc / "net" / name).read_text(encoding="ascii").splitlines()[1:]
        except OSError:  # no IPv6
            continue
        for row in rows:
            _, local, _, state, *_, inode = row.split()[:10]
            if state == _LISTENING:
                address, port = local.split(":")
                # The kernel prints words of four bytes in the machine's order, which is little-endian.
                raw = b"".join(bytes.fromhex(word)[::-1] for word in re.findall(".{8}", address))
                yield inode, (ipaddress.ip_address(raw), int(port, 16))


def _tree(pid: int, proc: Path) -> Iterator[Path]:
    """The process and its descendants."""
    children: dict[int, list[int]] = {}
    for directory in proc.glob("[0-9]*"):
        try:
            fields = (directory / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children.setdefault(int(fields[1]), []).append(int(directory.name))
    left = [pid]
    while left:
        each = left.pop()
        yield proc / str(each)
        left += children.get(each, [])


def _sockets_of(process: Path) -> Iterator[str]:
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:
        return
    for descriptor in descriptors:
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target.removeprefix("socket:[").removesuffix("]")
