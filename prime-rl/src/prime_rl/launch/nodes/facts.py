"""What an agent reports about its node."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prime_rl.launch.caches import cpu_allocator_env, installed_tcmalloc
from prime_rl.launch.devices import indices_by_uuid, processes_on, usable_cores
from prime_rl.utils.gpus import masked_gpus, usable_gpus

NAME_VARIABLES = ("SLURMD_NODENAME",)
"""Names that a scheduler gives a node. Several may run on one machine."""

_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node as its agent sees it."""

    name: str
    hostname: str
    interfaces: Mapping[str, str]
    """IPv4 address of each network interface, by its name."""
    hostname_address: str | None
    """The address that the host's own name stands for here."""
    gpus: tuple[str, ...]
    """Ids of the GPUs that the agent may use."""
    named_gpus: tuple[str, ...]
    """Ids in CUDA_VISIBLE_DEVICES, which on a CPU count processes."""
    gpu_indices: Mapping[str, str]
    """Index by `GPU-…` id, for a server that only accepts indices."""
    busy_gpus: tuple[str, ...]
    """Programs that compute on these GPUs: `<pid>, <name>`."""
    cores: int
    ports: tuple[int, ...]
    """TCP ports that the agent holds for processes of the launch."""
    caches: Path
    """Directory for caches of compiled code."""
    bytecode: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that let children keep bytecode."""
    allocator: Mapping[str, str] = field(default_factory=dict)
    """Environment variables with which processes that compute on a CPU allocate memory."""


def node_name(env: Mapping[str, str]) -> str:
    """What the scheduler calls this node, or else the host's name."""
    return next((env[name] for name in NAME_VARIABLES if env.get(name)), socket.gethostname())


def gathered_facts(
    env: Mapping[str, str], ports: tuple[int, ...], caches: Path, bytecode: Mapping[str, str]
) -> NodeFacts:
    """Raises DeviceError: the mask of GPUs names one twice."""
    gpus = usable_gpus(env)
    return NodeFacts(
        name=node_name(env),
        hostname=socket.gethostname(),
        interfaces=dict(_interfaces()),
        hostname_address=_hostname_address(),
        gpus=gpus,
        named_gpus=masked_gpus(env) or (),
        gpu_indices={} if all(gpu.isdigit() for gpu in gpus) else indices_by_uuid(),
        busy_gpus=tuple(processes_on(gpus)) if gpus else (),
        cores=usable_cores(),
        ports=ports,
        caches=caches,
        bytecode=bytecode,
        allocator=cpu_allocator_env(installed_tcmalloc(), env),
    )


def _interfaces() -> Iterator[tuple[str, str]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
            except OSError:  # no IPv4 address, or not Linux
                continue
            yield name, socket.inet_ntoa(answer[20:24])


def _hostname_address() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
