"""A Ray cluster: connects to one or starts one for this user alone, and places an agent on each node of a run.

Not part of the driver, which runs as `__main__`: Ray would pickle the actor's class with all that it refers to.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from medarc_rl.backends.options import Strategy
from medarc_rl.errors import MedarcError
from prime_rl.launch.host import LocalHost
from prime_rl.launch.nodes.cluster import PipeChannel, agent_argv
from prime_rl.launch.reaper import MARK_VARIABLE
from prime_rl.launch.spec import Signalled
from prime_rl.utils.errors import CannotStart
from prime_rl.utils.gpus import MASK_VARIABLE, masked_gpus, usable_gpus
from prime_rl.utils.private import RUNTIME_VARIABLE
from prime_rl.utils.scratch import scratch_directory
from prime_rl.utils.terminal import say
from prime_rl.utils.waiting import Wait, telling

TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_STARTS = 4
"""Ray gives a node 30 seconds to start, which a busy machine may exceed."""
_LONGEST = 44
"""Most characters of the directory's name: Ray appends 62 to name a socket, and a socket's name has at most 107."""
_TIMED_OUT = "timed out during startup"
_LOOK_S = 5.0
_DESCRIBE_LIMIT_S = 10.0
_CLOSE_LIMIT_S = 180.0
"""Longer than the time after which an agent that does not end is killed."""
_GROUPS = {"orders": 1, "reports": 1, "others": 1}
"""One thread each: lines stay in order, and waiting for a report holds up no order."""
_OF_RAY = ("RAY_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""Variables that Ray sets on a node, where the driver's values would be wrong."""
_LISTENING = "0A"


# Connecting: to a cluster that runs, or to one that this function starts for this user alone.


@contextmanager
def connected(address: str | None, gpus: int | None = None) -> Iterator[None]:
    """Connect to the cluster at `address`, or start one with `gpus` GPUs on this machine for the block.

    Call it in the main thread.

    Raises:
        MedarcError: the cluster cannot be reached or started, or others could use it.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Started by `uv run`, Ray would upload the current directory and let uv make another environment for its workers.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    # Workers that ask for no GPU see none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    if address is not None:
        if _listens_on_loopback_alone(address):
            os.environ[_LOOPBACK_VARIABLE] = "0"
        with _initialised(address=address):
            yield
        return
    # Its guard ends Ray's processes, which carry the mark, if this process is killed.
    with LocalHost() as guarded, scratch_directory("ray") as directory:
        os.environ[MARK_VARIABLE] = str(guarded.directory)
        if len(str(directory)) > _LONGEST:
            raise MedarcError(
                f"{directory}: this path is too long for Ray's sockets: set {RUNTIME_VARIABLE} to a shorter one"
            )
        _keep_to_this_user(os.environ, directory)
        # Reads the variables above when it is imported.
        count = len(masked_gpus(os.environ) or usable_gpus(os.environ)) if gpus is None else gpus
        with _initialised(address="local", num_gpus=count, include_dashboard=False, _temp_dir=str(directory)):
            _end_if_asked(guarded)
            if listeners := open_listeners(os.getpid()):
                raise MedarcError(
                    f"Ray listens on addresses that other machines can reach ({', '.join(listeners)}): the run is not "
                    "started"
                )
            yield


@contextmanager
def _initialised(**options: Any) -> Iterator[None]:
    import ray

    for left in reversed(range(_STARTS)):
        at = "to start on this machine" if options["address"] == "local" else f"at {options['address']} to answer"
        attempt = f"attempt {_STARTS - left} of {_STARTS}"
        try:
            with telling(f"waiting for Ray {at}", say, lambda attempt=attempt: attempt):  # type: ignore[misc]
                ray.init(configure_logging=False, log_to_driver=False, **options)
            break
        except SystemExit as ended:
            # Ray's handler of SIGTERM exits with the number of the signal.
            raise SystemExit(128 + ended.code if isinstance(ended.code, int) else 1) from ended
        # Ray's errors have no common class.
        except Exception as error:
            ray.shutdown()
            if not left or _TIMED_OUT not in str(error):
                where = "on this machine" if options["address"] == "local" else f"at {options['address']}"
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise MedarcError(f"no Ray cluster {where}: {lines[0]}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _end_if_asked(guarded: LocalHost) -> None:
    """Raises SystemExit if a signal arrived while Ray started: `guarded` has received it."""
    while (event := guarded.next_event(0)) is not None:
        if isinstance(event, Signalled) and event.signal in (signal.SIGINT, signal.SIGTERM):
            raise SystemExit(128 + event.signal)


def _keep_to_this_user(env: MutableMapping[str, str], directory: Path) -> None:
    """Let a local cluster listen on the loopback address alone, and ask for a token there.

    Ray makes directories that others may write to; these are in one that they cannot enter.
    """
    token = directory / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32), encoding="ascii")
    for name in (*TOKEN_VARIABLES, "RAY_ADDRESS"):
        env.pop(name, None)
    env["RAY_AUTH_MODE"] = "token"
    env["RAY_AUTH_TOKEN_PATH"] = str(token)
    # Workers that nobody has asked for take the processor from the run.
    env["RAY_prestart_worker_first_driver"] = "0"
    # A cluster of one machine then uses 127.0.0.1.
    env[_LOOPBACK_VARIABLE] = "0"


def _listens_on_loopback_alone(address: str) -> bool:
    """Whether a cluster on this machine is one that other machines do not reach. Ray would look for it at the machine's
    outward address."""
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost"):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: it only asks for the address of the route.
            probe.connect(("192.0.2.1", 9))
            socket.create_connection((probe.getsockname()[0], int(port)), 1.0).close()
        except OSError:
            return True
    return False


def asks_for_token() -> bool:
    """Whether the cluster that this process is connected to accepts only those who know its token."""
    raylet = import_module("ray._raylet")
    return bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)


# Listening sockets: what of a process and its descendants other machines can connect to.


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


# Placement: an actor on each node of a run, in a bundle that Ray has reserved.


def bundles_for(gpus_per_node: Sequence[int], device: str) -> list[dict[str, float]]:
    """The resource request of each node of a run. Without GPUs in the cluster, a run with `auto` computes on CPUs."""
    import ray

    on_cpu = device == "cpu" or (device == "auto" and not ray.cluster_resources().get("GPU", 0))
    return [{"CPU": 1, **({"GPU": count} if count and not on_cpu else {})} for count in gpus_per_node]


def shortage(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the nodes of a cluster, when nothing runs there, cannot hold all bundles; None if they can."""
    free = [dict(node["Resources"]) for node in nodes if node.get("Alive")]
    for bundle in sorted(bundles, key=lambda each: -each.get("GPU", 0)):
        node = next((node for node in free if all(node.get(key, 0) >= value for key, value in bundle.items())), None)
        if node is None:
            have = ", ".join(f"{node['NodeManagerAddress']} {node['Resources'].get('GPU', 0):g}" for node in nodes)
            return f"the run takes {_shown(bundles)}; the GPUs of the cluster's nodes: {have or 'no nodes'}"
        for key, value in bundle.items():
            node[key] -= value
    return None


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
        waiting = Wait(f"Ray to free {_shown(bundles)}", "", float("inf"), "", tell=say)
        while not ray.wait([group.ready()], timeout=_LOOK_S)[0]:
            waiting.advice = f"{_free()} are free; `ray status` shows who uses the others"
            waiting.is_over()
        remote = ray.remote(concurrency_groups=_GROUPS)(AgentRunner)
        for index, bundle in enumerate(bundles):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            options = {"num_cpus": 1, "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": where}
            actors.append(remote.options(**options).remote())
        with telling(f"waiting for Ray to start a process on {_nodes(bundles)}", say):
            placements = _get([actor.placement.options(concurrency_group="others").remote() for actor in actors])
        yield RayCluster(placements, actors)
    except _errors() as error:
        raise MedarcError(f"Ray could not start an actor: {_first_line(error)}") from error
    finally:
        for actor in actors:
            kill(actor)
        with suppress(*_errors()):
            remove_placement_group(group)


def kill(actor: Any) -> None:
    import ray

    with suppress(*_errors()):
        ray.kill(actor)


def _nodes(bundles: Sequence[Mapping[str, float]]) -> str:
    return "1 node" if len(bundles) == 1 else f"{len(bundles)} nodes"


def _free() -> str:
    """GPUs and CPUs of the cluster that nobody uses, `2 of 8 GPUs and 30 of 64 CPUs`."""
    import ray

    whole, free = ray.cluster_resources(), ray.available_resources()
    counts = [f"{free.get(kind, 0):g} of {whole[kind]:g} {kind}s" for kind in ("GPU", "CPU") if kind in whole]
    return " and ".join(counts)


def _shown(bundles: Sequence[Mapping[str, float]]) -> str:
    counts = sorted({int(each.get("GPU", 0)) for each in bundles})
    return f"{_nodes(bundles)} with {' or '.join(map(str, counts))} GPU{'' if counts == [1] else 's'}"


def check_capacity() -> int:
    """`python -m medarc_rl.backends.ray.cluster ADDRESS '[4, 4]' cpu|cuda|auto`: whether a cluster can hold a run.

    Exit code 1: it cannot. Runs in a separate process, because connecting starts threads and loads Ray.
    """
    address, gpus, device = sys.argv[1:]
    try:
        with connected(address):
            import ray

            fault = shortage(bundles_for(json.loads(gpus), device), ray.nodes())
    except MedarcError as error:
        fault = str(error)
    if fault is not None:
        sys.stderr.write(f"error: {fault}\n")
    return 0 if fault is None else 1


# Agents: an actor starts our agent on its node and carries its lines.


@dataclass(frozen=True, slots=True)
class Placement:
    """An actor's node, and the GPUs that Ray has given to it."""

    name: str
    address: str
    gpus: tuple[str, ...]


class AgentRunner:
    """Runs in an actor on a node. Its agent ends everything when this process is gone, because its stdin ends then."""

    def __init__(self) -> None:
        self._channel: PipeChannel | None = None

    def placement(self) -> Placement:
        import ray

        gpus = os.environ.get(MASK_VARIABLE, "")
        return Placement(socket.gethostname(), ray.util.get_node_ip_address(), tuple(filter(None, gpus.split(","))))

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

    def __init__(self, placement: Placement, actor: Any) -> None:
        self.name = placement.name
        self._placement = placement
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

    def close(self, limit_s: float = _CLOSE_LIMIT_S) -> None:
        with suppress(*_errors()):
            # An actor that is stopped, or cannot be reached, never answers. It is killed with the others at the end.
            waited_s = min(limit_s, _CLOSE_LIMIT_S)
            _get(self._actor.close.options(concurrency_group="others").remote(), waited_s)

    def describe(self) -> str:
        where = f"Ray actor on {self.name} ({self._placement.address})"
        if self._death:
            return f"{where}: {self._death}"
        try:
            said: str = _get(self._actor.describe.options(concurrency_group="others").remote(), _DESCRIBE_LIMIT_S)
        except _errors() as error:
            return f"{where}: {_first_line(error)}"
        return f"{where}: {said}"


class RayCluster:
    """Nodes that Ray has given to this run: implements `Cluster`."""

    def __init__(self, placements: Sequence[Placement], actors: Sequence[Any]) -> None:
        self.placements = tuple(placements)
        self._actors = tuple(actors)
        self._address = dict(zip(self.names, (placement.address for placement in placements), strict=True))

    @property
    def names(self) -> tuple[str, ...]:
        """Host names, with a number where several are on one machine."""
        hosts = [placement.name for placement in self.placements]
        return tuple(name if hosts.count(name) == 1 else f"{name}/{index}" for index, name in enumerate(hosts))

    def channels(self) -> list[RayChannel]:
        """Start an agent in each actor. A later call starts new ones. Raises CannotStart."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RAY)}
        directory = os.getcwd()  # noqa: PTH109
        starting = [actor.start.options(concurrency_group="others").remote(directory, env) for actor in self._actors]
        faults = [fault for reference in starting if (fault := _get(reference)) is not None]
        if faults:
            raise CannotStart("\n".join(faults))
        return [RayChannel(placement, actor) for placement, actor in zip(self.placements, self._actors, strict=True)]

    def address(self, name: str) -> str | None:
        return self._address.get(name)


def _get(references: Any, limit_s: float | None = None) -> Any:
    """Raises one of `_errors()`, also when the limit is over."""
    import ray

    return ray.get(references, timeout=limit_s)


def _errors() -> tuple[type[BaseException], ...]:
    from ray.exceptions import RayError

    return (RayError,)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


if __name__ == "__main__":
    raise SystemExit(check_capacity())
