"""Messages between the head of a launch and its agents: one JSON object per line.

Lines travel over stdin and stdout of the agent, so that whatever started it (srun, ssh, a Ray actor) carries and
protects them. An order with a number is answered with an `Answer` of the same number.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from prime_rl.launch.caches import cpu_allocator_env, installed_tcmalloc
from prime_rl.launch.devices import indices_by_uuid, processes_on
from prime_rl.launch.spec import ProcessSpec
from prime_rl.launch.stalling import Observed
from prime_rl.utils.errors import RunError
from prime_rl.utils.gpus import masked_gpus, usable_gpus
from prime_rl.utils.limits import usable_cpus

# The node, as its agent reports it in the first message.


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
        cores=usable_cpus(),
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


PROTOCOL = 2
"""Raise it when a message changes: head and agents may run different checkouts."""

MAX_LINE_BYTES = 64 * 2**20

PING_EVERY_S = 2.0
"""Both sides say something this often."""


class _Order(msgspec.Struct, frozen=True, tag=True):
    number: int = 0
    """0 asks for no answer."""


class Start(_Order, frozen=True, kw_only=True):
    """Start a process. Its secrets travel here, and in no argument list or file."""

    spec: ProcessSpec
    umask: int


class Stop(_Order, frozen=True, kw_only=True):
    """Ask a process to stop."""

    name: str


class Relay(_Order, frozen=True, kw_only=True):
    """Forward a signal to the processes that handle it. The answer's `heard` tells whether one does."""

    name: str
    signum: signal.Signals


class EndAll(_Order, frozen=True, kw_only=True):
    """End everything that is left."""

    grace_s: float


class Tail(_Order, frozen=True, kw_only=True):
    """The last lines of a log."""

    name: str


class Stacks(_Order, frozen=True, kw_only=True):
    """Make processes write their stacks."""

    names: tuple[str, ...]


class SeeLock(_Order, frozen=True, kw_only=True):
    """Tell whether a file, which the head has locked, is there and locked. The answer's `heard` is the result."""

    file: Path


class Ping(_Order, frozen=True):
    """The head is alive."""


Order = Start | Stop | Relay | EndAll | Tail | Stacks | SeeLock | Ping

SLOW_ORDERS = (Start, Tail, Stacks, SeeLock)
"""Orders that touch files, which a shared file system may delay. Others do not wait behind them."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first line of an agent."""

    facts: NodeFacts
    protocol: int = PROTOCOL


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The only line of an agent that cannot work."""

    fault: str


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The result of an order."""

    number: int
    fault: str | None = None
    """Why it could not be carried out."""
    heard: bool = False
    lines: Mapping[str, list[str]] = {}
    """Lines of logs, by process."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A process has ended."""

    name: str
    code: int
    is_complete: bool
    """Whether it had done its work. Judged here, because other nodes may see the file that tells it later."""
    tail: list[str]
    """Its last log lines."""


class Caught(msgspec.Struct, frozen=True, tag=True):
    """The agent received a signal."""

    signum: signal.Signals


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The agent is alive. It sends this even while the file system of its node hangs."""


class Status(msgspec.Struct, frozen=True, tag=True):
    """Progress that the running processes have reported."""

    observed: Mapping[str, Observed]


Report = Hello | Refusal | Answer | Ended | Caught | Alive | Status

_MessageT = TypeVar("_MessageT")


def encoded(message: Order | Report) -> bytes:
    """A message as a line."""
    return msgspec.json.encode(message, enc_hook=_plain) + b"\n"


def order_of(line: bytes) -> Order:
    """Raises RunError, which does not quote the line: an order may hold secrets."""
    return _decoded(line, _ORDERS, "an order")


def report_of(line: bytes) -> Report:
    """Raises RunError."""
    return _decoded(line, _REPORTS, repr(line[:200].decode(errors="replace").strip()))


def _decoded(line: bytes, decoder: msgspec.json.Decoder[_MessageT], what: str) -> _MessageT:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        raise RunError(f"{what} ({error})") from error


def _plain(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to another node")


def _path(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} cannot be sent to another node")


_ORDERS: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order, dec_hook=_path)
_REPORTS: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report, dec_hook=_path)
