"""Places a job on the nodes of a cluster: facts that their agents report become the placements that a plan needs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Protocol

from prime_rl.launch.devices import GpuAssignment
from prime_rl.launch.job import Job
from prime_rl.launch.nodes.cluster import Channel, ClusterHost, PipeChannel, agent_argv
from prime_rl.launch.nodes.messages import NodeFacts
from prime_rl.launch.placement import Device, Placement, Ports, ResourceRequest
from prime_rl.launch.programs import GLOO_VARIABLE, Programs
from prime_rl.utils.engine_keys import ENGINE_KEY_VARIABLE, TRANSPORT_KEY_VARIABLE, named_key, new_engine_key
from prime_rl.utils.errors import CannotStart, DeviceError

_INFERENCE_PORT, _BROADCAST_PORT, _STORE_PORT = range(3)
"""Uses of the ports that an agent holds."""


class Cluster(Protocol):
    """The nodes that a scheduler has given to this launch."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the nodes, in the order in which a plan uses them."""

    def channels(self) -> Sequence[Channel]:
        """Start an agent on each node. Raises CannotStart or OSError."""

    def address(self, name: str) -> str | None:
        """The address at which the scheduler reaches a node, if it knows one."""


@contextmanager
def cluster_placement(
    host: ClusterHost,
    cluster: Cluster,
    request: ResourceRequest,
    env: Mapping[str, str],
    store: Path,
    programs: Programs,
) -> Iterator[Placement]:
    """The placement of a launch on several nodes, with one for each in `nodes`.

    `store` is a file in the run's directory through which the trainer's ranks meet, if the nodes can lock it.

    Raises:
        DeviceError: a node lacks GPUs, or no address that the others reach.
    """
    facts = host.facts
    device = _common_device(request, facts)
    named = _named_interfaces(request, env, facts)
    places = [_address(each, cluster.address(name), named) for each, name in zip(facts, cluster.names, strict=True)]
    _check_reachable(facts, places)
    placements = []
    engine_key = named_key(ENGINE_KEY_VARIABLE, env) or new_engine_key()
    transport_key = env.get(TRANSPORT_KEY_VARIABLE) or new_engine_key()
    with _meeting_place(host, store, places[request.infer_nodes][1], facts[request.infer_nodes]) as meeting_place:
        for index, (node, (interface, address)) in enumerate(zip(facts, places, strict=True)):
            gpus = _assigned(request, index, device, node)
            placements.append(
                Placement(
                    programs=programs,
                    device=device,
                    gpus=gpus,
                    gpu_indices=node.gpu_indices,
                    cores=node.cores,
                    env=env,
                    ports=Ports(node.ports[_INFERENCE_PORT], node.ports[_BROADCAST_PORT]),
                    meeting_place=meeting_place,
                    engine_key=engine_key,
                    caches=node.caches,
                    bytecode=node.bytecode,
                    allocator=node.allocator,
                    arguments=tuple(sys.argv[1:]),
                    node=index,
                    name=node.name,
                    address=address,
                    interface=interface,
                    is_interface_configured=request.interface is not None,
                    transport_key=transport_key,
                )
            )
        yield replace(placements[0], nodes=tuple(placements))


def _common_device(request: ResourceRequest, facts: Sequence[NodeFacts]) -> Device:
    """The device of all nodes. Raises DeviceError: some have GPUs and some have none."""
    without = [node.name for node in facts if not node.gpus]
    if request.device == "cpu" or (request.device == "auto" and len(without) == len(facts)):
        return "cpu"
    if without:
        raise DeviceError(f'device = "{request.device}", but no GPU can be used on {", ".join(without)}')
    return "cuda"


def _assigned(request: ResourceRequest, index: int, device: Device, node: NodeFacts) -> GpuAssignment:
    gpus = _gpus(request.gpus_of_nodes[index], device, node)
    if request.infer_nodes:
        return GpuAssignment(gpus, gpus)
    return GpuAssignment(gpus[: request.infer], gpus[request.infer :])


def _gpus(count: int, device: Device, node: NodeFacts) -> tuple[str, ...]:
    if device == "cpu":
        return node.named_gpus[:count]
    if len(node.gpus) < count:
        raise DeviceError(
            f"the run takes {count} GPUs of each node (deployment.gpus_per_node), and {len(node.gpus)} can be used on "
            f"{node.name} ({','.join(node.gpus)})"
        )
    if node.busy_gpus and len(node.gpus) == count:
        raise DeviceError(f"other programs compute on the GPUs of {node.name}: {'; '.join(node.busy_gpus)}")
    return node.gpus[:count]


def _named_interfaces(request: ResourceRequest, env: Mapping[str, str], facts: Sequence[NodeFacts]) -> tuple[str, ...]:
    """The network interfaces that the user names: of these each node uses the first that it has.

    Raises:
        DeviceError: a node has none of them.
    """
    key = f"{GLOO_VARIABLE}=" if request.interface is None else "deployment.network_interface = "
    named = env.get(GLOO_VARIABLE, "") if request.interface is None else request.interface
    names = tuple(filter(None, named.split(",")))
    without = [node for node in facts if names and not set(names) & set(node.interfaces)]
    if without:
        known = sorted({name for node in without for name in node.interfaces})
        near = get_close_matches(names[0], known, 1) or known
        who = ", ".join(f"{node.name} has {', '.join(node.interfaces) or 'none'}" for node in without)
        raise DeviceError(
            f"{key}{named}: no such network interface with an IPv4 address on every node: {who}; "
            f"use {' or '.join(near) or 'another'}"
        )
    return names


def _address(node: NodeFacts, given: str | None, named: Sequence[str]) -> tuple[str, str]:
    """Interface and address at which the other nodes reach this one.

    First an interface that the user names, then the scheduler's address, the address of the host's name, and any other
    that is not the loopback address.

    Raises:
        DeviceError: the node has no interface.
    """
    for name in named:
        if name in node.interfaces:
            return name, node.interfaces[name]
    by_address = {address: name for name, address in node.interfaces.items()}
    outward = [address for address in by_address if not address.startswith("127.")]
    for address in (given, node.hostname_address):
        if address in by_address and (address in outward or address == given):
            return by_address[address], address
    address = next(iter([*outward, *by_address]), None)
    if address is None:
        raise DeviceError(f"{node.name} has no network interface with an IPv4 address")
    return by_address[address], address


def _check_reachable(facts: Sequence[NodeFacts], places: Sequence[tuple[str, str]]) -> None:
    """Raises DeviceError: nodes on different machines, and one of them has only the loopback address."""
    if len({node.hostname for node in facts}) == 1:
        return
    for node, (_, address) in zip(facts, places, strict=True):
        if address.startswith("127."):
            raise DeviceError(
                f"{node.name} has only the address {address}, which other nodes cannot reach: set "
                "deployment.network_interface to an interface that they can reach"
            )


@contextmanager
def _meeting_place(host: ClusterHost, store: Path, address: str, node: NodeFacts) -> Iterator[str]:
    """Rendezvous of the ranks: the file `store` if all nodes see its locks, else a TCP store on the node of rank 0."""
    is_new = not store.parent.exists()
    store.parent.mkdir(parents=True, exist_ok=True)
    store.unlink(missing_ok=True)
    descriptor = os.open(store, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        has_locks = _is_locked(descriptor) and host.all_see_lock(store)
    finally:
        os.close(descriptor)
    try:
        yield str(store) if has_locks else f"tcp://{address}:{node.ports[_STORE_PORT]}"
    finally:
        store.unlink(missing_ok=True)
        if is_new:
            # A launch that was refused leaves nothing behind.
            with contextlib.suppress(OSError):
                store.parent.rmdir()


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def placement_lines(job: Job, placement: Placement) -> Iterator[str]:
    """One line for each node: what runs there, and on which GPUs."""
    for node in placement.nodes:
        here = [process for process in job.processes if process.node == node.node]
        ranks = [process.rank for process in here if process.name.startswith("trainer")]
        parts = [process.name for process in here if not process.name.startswith("trainer")]
        if ranks:
            parts.append(f"trainer rank {ranks[0]}" if len(ranks) == 1 else f"trainer ranks {ranks[0]}-{ranks[-1]}")
        gpus = tuple(dict.fromkeys(gpu for process in here for gpu in process.gpus))
        where = f"GPU {','.join(gpus)}" if placement.device == "cuda" else f"CPU, {node.cores} cores"
        yield f"{node.name} ({node.address}): {', '.join(parts)}; {where}"


# The nodes of a Slurm job: srun starts an agent on each.


_LIMIT_S = 30.0

_OF_TASKS_OR_ALL_NODES = ("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")
"""GPUs of a job that are not asked for by node. srun would take their number for one node."""
_GPUS = re.compile(r"\bgpu:(?:[^:(),]+:)?(\d+)\(")
"""Number of GPUs of a type, as in `gpu:a100:2(IDX:0-1)`."""
_OF_THE_STEP = (
    *_OF_TASKS_OR_ALL_NODES,
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_CPUS_PER_GPU",
    "SLURM_EXCLUSIVE",
)
"""Options of the job that srun would apply to a step, too."""


def slurm_cluster(env: Mapping[str, str] = os.environ) -> SlurmCluster | None:
    """The nodes of this Slurm job. None outside a job, and in one of a single node."""
    is_one = int(env.get("SLURM_JOB_NUM_NODES") or 1) < 2 or "SLURM_JOB_ID" not in env
    return None if is_one else SlurmCluster(dict(env))


class SlurmCluster:
    """The nodes of the job that this process runs in."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Raises CannotStart: Slurm does not answer."""
        return tuple(_ask("scontrol", "show", "hostnames", self.env.get("SLURM_JOB_NODELIST", "")))

    @cached_property
    def gpus(self) -> Mapping[str, int]:
        """GPUs that the job has on each node, if srun must be told. Raises CannotStart: Slurm does not answer."""
        found: dict[str, int] = {}
        if not set(_OF_TASKS_OR_ALL_NODES) & set(self.env):
            return found
        for line in _ask("scontrol", "--details", "show", "job", self.env["SLURM_JOB_ID"]):
            words = dict(word.split("=", 1) for word in line.split() if "=" in word)
            count = sum(map(int, _GPUS.findall(words.get("GRES", ""))))
            if "Nodes" in words and count:
                found |= dict.fromkeys(_ask("scontrol", "show", "hostnames", words["Nodes"]), count)
        return found

    def channels(self) -> Sequence[Channel]:
        env = {name: value for name, value in self.env.items() if name not in _OF_THE_STEP}
        return [PipeChannel(name, self.step(name), env) for name in self.names]

    def step(self, name: str) -> tuple[str, ...]:
        """The command that starts the agent of a node.

        The step takes everything that the job has on its node, and overlaps with the batch script on the first one. A
        task that fails does not make srun wait.
        """
        options = ("--nodes=1", "--ntasks=1", f"--nodelist={name}", "--overlap", "--mem=0", "--export=ALL")
        gpus = (f"--gpus={self.gpus[name]}",) if name in self.gpus else ()
        return ("srun", *options, *gpus, "--kill-on-bad-exit=1", "--job-name=agent", *agent_argv())

    def address(self, name: str) -> str | None:
        for line in _ask("scontrol", "--oneliner", "show", "node", name):
            words = dict(word.split("=", 1) for word in line.split() if "=" in word)
            try:
                return socket.gethostbyname(words["NodeAddr"])
            except (KeyError, OSError):
                return None
        return None


def _ask(*argv: str) -> list[str]:
    try:
        answer = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=_LIMIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        raise CannotStart(f"{' '.join(argv[:3])}: {said}") from error
    return [line for line in answer.stdout.splitlines() if line.strip()]
