"""Claims what a launch may use of this machine: GPUs, cores, ports, caches."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from prime_rl.launch.caches import (
    bytecode_env,
    compile_caches,
    cpu_allocator_env,
    installed_tcmalloc,
    made_for,
    packages_are_compiled,
)
from prime_rl.launch.devices import GpuAssignment, assign_gpus, gpu_names, indices_by_uuid, processes_on
from prime_rl.launch.programs import LOOPBACK, LOOPBACK_INTERFACE, Programs
from prime_rl.utils.engine_keys import ENGINE_KEY_VARIABLE, named_key, new_engine_key
from prime_rl.utils.errors import DeviceError
from prime_rl.utils.gpus import MASK_VARIABLE, choose_device, masked_gpus, usable_gpus
from prime_rl.utils.limits import usable_cpus


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


Device = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """GPUs or CPU processes that a run needs."""

    device: Literal["auto", "cuda", "cpu"]
    infer: int = 0
    """GPUs of the inference server; on CPUs, processes."""
    train: int = 0
    infer_ids: tuple[int, ...] | None = None
    """GPUs that the config names. None takes the first free ones."""
    train_ids: tuple[int, ...] | None = None
    frozen: tuple[int, ...] = ()
    """GPUs of their own of each judge and of the teacher."""
    infer_nodes: int = 0
    """Nodes of their own for inference. On several nodes the numbers above count per node."""
    train_nodes: int = 0
    interface: str | None = None
    """Network interface that the config names for all nodes."""

    @property
    def nodes(self) -> int:
        """Number of nodes: inference comes first, then training."""
        return max(1, self.infer_nodes + self.train_nodes)

    @property
    def gpus_of_nodes(self) -> tuple[int, ...]:
        """GPUs of each node. It serves or trains, unless no node is for inference alone."""
        if self.infer_nodes:
            return (self.infer,) * self.infer_nodes + (self.train,) * self.train_nodes
        return (self.infer + self.train + sum(self.frozen),) * self.nodes


@dataclass(frozen=True, slots=True)
class Sharing:
    """Measures that let several launches run on one node."""

    free_ports: bool = False
    """Choose free ports at run time instead of those in the config."""
    exact_gpus: bool = False
    """Require that exactly the needed GPUs are visible, as a scheduler grants them."""
    shares_gpus: bool = False
    """Let a server and a process of the trainer share each GPU."""
    gpus: tuple[str, ...] | None = None
    """Ids of the visible GPUs to use. None: all that are visible."""

    def env(self, env: Mapping[str, str]) -> Mapping[str, str]:
        """The launcher's environment, with only these GPUs visible."""
        return env if self.gpus is None else {**env, MASK_VARIABLE: ",".join(self.gpus)}


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports of one launch. None uses the port in the config."""

    inference: int | None = None
    broadcast: int | None = None
    more_servers: tuple[int, ...] = ()
    """Of the servers after the first, if each GPU has one."""
    frozen: tuple[int, ...] = ()
    """Ports of judges and of the teacher, chosen at run time. The teacher's is used if `inference` is chosen."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Everything that a plan depends on, apart from the config."""

    programs: Programs
    device: Device
    gpus: GpuAssignment
    gpu_indices: Mapping[str, str]
    """Index by `GPU-…` id, for a server that only accepts indices."""
    cores: int
    env: Mapping[str, str]
    """The launcher's own environment."""
    ports: Ports
    meeting_place: str
    """Rendezvous of the trainer's ranks: a file, because any user of the machine could connect to a TCP store, or
    `tcp://ADDRESS:PORT` where nodes share no file that they can lock."""
    engine_key: str = field(repr=False)
    """Key that the inference server of this launch requires."""
    caches: Path
    """Directory for caches of compiled code."""
    bytecode: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that let children keep bytecode."""
    allocator: Mapping[str, str] = field(default_factory=dict)
    """Environment variables with which processes that compute on a CPU allocate memory."""
    arguments: tuple[str, ...] = ()
    """The launcher's command line, which W&B records."""
    node: int = 0
    """Index of the node."""
    name: str = ""
    """Name of the node, in a launch on several."""
    address: str = LOOPBACK
    """Address on which the processes of the node listen."""
    interface: str = LOOPBACK_INTERFACE
    """The network interface with that address."""
    is_interface_configured: bool = False
    """Whether the config names the interface, so that NCCL must use it, too."""
    transport_key: str | None = field(default=None, repr=False)
    """Key of ZeroMQ sockets between nodes."""
    nodes: tuple[Placement, ...] = ()
    """The placements of several nodes, in order. Empty on one node."""

    @property
    def servers(self) -> tuple[Placement, ...]:
        """One placement for each inference server on this node: one, or one for each GPU that trains, too."""
        if not self.ports.more_servers:
            return (self,)
        ports, gpus = (self.ports.inference, *self.ports.more_servers), self.gpus.inference
        return tuple(
            replace(
                self,
                ports=replace(self.ports, inference=port),
                gpus=replace(self.gpus, inference=gpus[index : index + 1]),
            )
            for index, port in enumerate(ports)
        )

    @property
    def each(self) -> tuple[Placement, ...]:
        """One placement for each node."""
        return self.nodes or (self,)


@contextmanager
def claimed_placement(
    request: ResourceRequest, sharing: Sharing, env: Mapping[str, str], scratch: Path, bin_dir: Path | None = None
) -> Iterator[Placement]:
    """Choose GPUs, and hold ports and caches during the block. `scratch` is the launch's own directory.

    Raises:
        DeviceError: the machine lacks the GPUs, or other programs compute on them.
        CannotStart: a program of the engine is not installed.
        NotPrivate: another user owns the cache.
    """
    env = sharing.env(env)
    device, gpus = place(request, sharing, env)
    programs = Programs.find(bin_dir)
    combination = made_for(gpu_names(gpus.all) if device == "cuda" else (), env)
    with ExitStack() as held:
        more = request.train - 1 if sharing.shares_gpus else 0
        of_frozen = len(request.frozen)
        free = held.enter_context(reserved_ports(of_frozen + more + (2 if sharing.free_ports else 0)))
        ports = Ports(frozen=free[:of_frozen], more_servers=free[of_frozen : of_frozen + more])
        if sharing.free_ports:
            ports = replace(ports, inference=free[-2], broadcast=free[-1])
        yield Placement(
            programs=programs,
            device=device,
            gpus=gpus,
            gpu_indices={} if all(gpu.isdigit() for gpu in gpus.inference) else indices_by_uuid(),
            cores=usable_cpus(),
            env=dict(env),
            ports=ports,
            meeting_place=str(scratch / "store"),
            engine_key=named_key(ENGINE_KEY_VARIABLE, env) or new_engine_key(),
            caches=held.enter_context(compile_caches(env, combination, scratch / "caches")),
            bytecode=bytecode_env(env, packages_are_compiled()),
            allocator=cpu_allocator_env(installed_tcmalloc(), env),
            arguments=tuple(sys.argv[1:]),
        )


def place(
    request: ResourceRequest, sharing: Sharing, env: Mapping[str, str], dev: Path = Path("/dev")
) -> tuple[Device, GpuAssignment]:
    """Choose the device, and the GPUs of inference and trainer.

    On CPUs, a mask that does not fit is ignored, because nothing computes on its GPUs.

    Raises:
        DeviceError: the machine lacks the GPUs, or other programs compute on them.
    """
    usable = usable_gpus(env, dev)
    device = choose_device(request.device, usable)
    try:
        gpus = _assigned(request, sharing, usable if device == "cuda" else masked_gpus(env) or ())
    except DeviceError:
        if device == "cuda":
            raise
        return device, GpuAssignment()
    if device == "cuda" and (busy := processes_on(gpus.all)):
        raise DeviceError(f"other programs compute on the GPUs of this run: {'; '.join(busy)}")
    return device, gpus


def _assigned(request: ResourceRequest, sharing: Sharing, ids: tuple[str, ...]) -> GpuAssignment:
    named = (request.infer_ids, request.train_ids)
    if named == (None, None) and sharing.exact_gpus:
        _check_exact(request, sharing, ids)
    if named == (None, None) and sharing.shares_gpus:
        if not ids:
            raise DeviceError(f"{_sharing_mode(request.train)}, but none can be used here")
        both = assign_gpus(ids, request.train, 0, frozen=request.frozen)
        return replace(both, trainer=both.inference)
    return assign_gpus(ids, request.infer, request.train, *named, frozen=request.frozen)


def _sharing_mode(gpus: int, of_frozen: str = "") -> str:
    if gpus == 1:
        return f"single-GPU mode needs 1{of_frozen or ' GPU'}"
    return f"{gpus} shared GPUs are needed{of_frozen}"


def _check_exact(request: ResourceRequest, sharing: Sharing, ids: tuple[str, ...]) -> None:
    frozen = sum(request.frozen)
    needed = (request.train if sharing.shares_gpus else request.infer + request.train) + frozen
    if len(ids) == needed:
        return
    of_frozen = f" + {frozen} of judges and teacher" if frozen else ""
    wanted = _sharing_mode(request.train, of_frozen)
    if not sharing.shares_gpus:
        wanted = f"{request.infer} inference + {request.train} training{of_frozen} GPUs are {needed}"
    raise DeviceError(
        f"{wanted}, but {len(ids)} can be used here ({','.join(ids) or 'none'}): "
        "set CUDA_VISIBLE_DEVICES to the ones to use"
    )
