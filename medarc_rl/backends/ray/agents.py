"""Agents in Ray actors: an actor on each node starts our agent and carries its lines."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from medarc_rl.backends.ray.ray_options import Strategy
from medarc_rl.errors import MedarcError
from prime_rl.launch.nodes.cluster import PipeChannel, agent_argv
from prime_rl.utils.errors import CannotStart
from prime_rl.utils.gpus import MASK_VARIABLE
from prime_rl.utils.waiting import Wait

_LOOK_S = 5.0
_DESCRIBE_LIMIT_S = 10.0
_CLOSE_LIMIT_S = 180.0
"""An agent that does not end needs less to be killed."""
_GROUPS = {"orders": 1, "reports": 1, "others": 1}
"""One thread each: lines stay in order, and waiting for a report holds up no order."""
_OF_RAY = ("RAY_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""Variables that Ray sets on a node. The driver's own do not hold there."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where an actor runs, and the GPUs that Ray has given to it."""

    name: str
    address: str
    gpus: tuple[str, ...]


class AgentRunner:
    """Runs in an actor on a node. Its agent ends everything when this process is gone, because its stdin ends then."""

    def __init__(self) -> None:
        self._channel: PipeChannel | None = None

    def seat(self) -> Seat:
        import ray

        gpus = os.environ.get(MASK_VARIABLE, "")
        return Seat(socket.gethostname(), ray.util.get_node_ip_address(), tuple(filter(None, gpus.split(","))))

    def start(self, directory: str, env: Mapping[str, str]) -> str | None:
        """Start the agent in the driver's directory, with its variables. Returns a fault, or None."""
        try:
            os.chdir(directory)
        except OSError as error:
            return f"{directory}: {error.strerror} on {socket.gethostname()}: share the directory between the nodes"
        own = {name: value for name, value in os.environ.items() if name.startswith(_OF_RAY) or name == "PATH"}
        own.pop("OMP_NUM_THREADS", None)
        self._channel = PipeChannel(socket.gethostname(), agent_argv(), {**env, **own})
        return None

    def send(self, message: bytes) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def receive(self) -> bytes | None:
        return None if self._channel is None else self._channel.receive()

    def describe(self) -> str:
        return "no agent was started" if self._channel is None else self._channel.describe()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


class RayChannel:
    """The head's side: implements `Channel`."""

    def __init__(self, seat: Seat, actor: Any) -> None:
        self.name = seat.name
        self._seat = seat
        self._actor = actor
        self._death = ""

    def send(self, message: bytes) -> None:
        with suppress(*_errors()):
            self._actor.send.options(concurrency_group="orders").remote(message)

    def receive(self) -> bytes | None:
        try:
            line: bytes | None = _get(self._actor.receive.options(concurrency_group="reports").remote())
        except _errors() as error:
            self._death = _first_line(error)
            return None
        return line

    def close(self) -> None:
        with suppress(*_errors()):
            # An actor that is stopped, or cannot be reached, never answers. It is killed with the others at the end.
            _get(self._actor.close.options(concurrency_group="others").remote(), _CLOSE_LIMIT_S)

    def describe(self) -> str:
        where = f"Ray actor on {self.name} ({self._seat.address})"
        if self._death:
            return f"{where}: {self._death}"
        try:
            said: str = _get(self._actor.describe.options(concurrency_group="others").remote(), _DESCRIBE_LIMIT_S)
        except _errors() as error:
            return f"{where}: {_first_line(error)}"
        return f"{where}: {said}"


class RayCluster:
    """Nodes that Ray has given to this run: implements `Cluster`."""

    def __init__(self, seats: Sequence[Seat], actors: Sequence[Any]) -> None:
        self.seats = tuple(seats)
        self._actors = tuple(actors)
        self._address = dict(zip(self.names, (seat.address for seat in seats), strict=True))

    @property
    def names(self) -> tuple[str, ...]:
        """Host names, with a number where several are on one machine."""
        hosts = [seat.name for seat in self.seats]
        return tuple(name if hosts.count(name) == 1 else f"{name}/{index}" for index, name in enumerate(hosts))

    def channels(self) -> list[RayChannel]:
        """Start an agent in each actor. A later call starts new ones. Raises CannotStart."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RAY)}
        directory = os.getcwd()  # noqa: PTH109
        starting = [actor.start.options(concurrency_group="others").remote(directory, env) for actor in self._actors]
        faults = [fault for reference in starting if (fault := _get(reference)) is not None]
        if faults:
            raise CannotStart("\n".join(faults))
        return [RayChannel(seat, actor) for seat, actor in zip(self.seats, self._actors, strict=True)]

    def address(self, name: str) -> str | None:
        return self._address.get(name)


def bundles_for(gpus_per_node: Sequence[int], device: str) -> list[dict[str, float]]:
    """What each node of a run asks for. Without GPUs, a run with `auto` computes on CPUs."""
    import ray

    on_cpu = device == "cpu" or (device == "auto" and not ray.cluster_resources().get("GPU", 0))
    return [{"CPU": 1, **({"GPU": count} if count and not on_cpu else {})} for count in gpus_per_node]


@contextmanager
def placed(bundles: Sequence[Mapping[str, float]], strategy: Strategy) -> Iterator[RayCluster]:
    """Let Ray place an actor in each bundle. Waits until the cluster has them all.

    Raises:
        MedarcError: the cluster does not have them, also when nothing else runs there.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    if fault := shortage(bundles, ray.nodes()):
        raise MedarcError(fault)
    group = placement_group(list(map(dict, bundles)), strategy=strategy.upper())
    actors: list[Any] = []
    try:
        waiting = Wait(f"Ray to free {_shown(bundles)}", "`ray status` shows who uses them", float("inf"), "")
        while not ray.wait([group.ready()], timeout=_LOOK_S)[0]:
            waiting.is_over()
        remote = ray.remote(concurrency_groups=_GROUPS)(AgentRunner)
        for index, bundle in enumerate(bundles):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            options = {"num_cpus": 1, "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": place}
            actors.append(remote.options(**options).remote())
        seats = _get([actor.seat.options(concurrency_group="others").remote() for actor in actors])
        yield RayCluster(seats, actors)
    except _errors() as error:
        raise MedarcError(f"Ray could not start an actor: {_first_line(error)}") from error
    finally:
        for actor in actors:
            kill(actor)
        with suppress(*_errors()):
            remove_placement_group(group)


def shortage(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the nodes of a cluster, when nothing runs there, cannot hold all bundles; None if they can."""
    free = [dict(node["Resources"]) for node in nodes if node.get("Alive")]
    for bundle in sorted(bundles, key=lambda each: -each.get("GPU", 0)):
        room = next((node for node in free if all(node.get(key, 0) >= value for key, value in bundle.items())), None)
        if room is None:
            have = ", ".join(f"{node['NodeManagerAddress']} {node['Resources'].get('GPU', 0):g}" for node in nodes)
            return f"the run takes {_shown(bundles)}; the GPUs of the cluster's nodes: {have or 'no nodes'}"
        for key, value in bundle.items():
            room[key] -= value
    return None


def kill(actor: Any) -> None:
    import ray

    with suppress(*_errors()):
        ray.kill(actor)


def _shown(bundles: Sequence[Mapping[str, float]]) -> str:
    nodes = "1 node" if len(bundles) == 1 else f"{len(bundles)} nodes"
    counts = sorted({int(each.get("GPU", 0)) for each in bundles})
    return f"{nodes} with {' or '.join(map(str, counts))} GPU{'' if counts == [1] else 's'}"


def _get(references: Any, limit_s: float | None = None) -> Any:
    """Raises one of `_errors()`, also when the limit is over."""
    import ray

    return ray.get(references, timeout=limit_s)


def _errors() -> tuple[type[BaseException], ...]:
    from ray.exceptions import RayError

    return (RayError,)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
