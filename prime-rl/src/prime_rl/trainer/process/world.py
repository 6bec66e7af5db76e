"""Joins this process to the trainer's process group.

Ranks find each other through a store, and exchange objects that are unpickled without running code: torch pickles
them, so otherwise a user who can connect to a rank, or write a checkpoint, could run code as this user.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import enum
import os
import pathlib
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from prime_rl.run.paths import STORE_VARIABLE
from prime_rl.run.process import own_beats
from prime_rl.trainer.process.errors import TrainerError
from prime_rl.trainer.process.host_memory import map_large_tensors
from prime_rl.transport.weights import tcp_store
from prime_rl.utils.logger import count_of, get_logger
from prime_rl.utils.waiting import Wait


def open_store(environ: Mapping[str, str], world_size: int, timeout: timedelta) -> dist.Store | None:
    """Open the store for `init_process_group`; None lets torch open its own, as under torchrun.

    One process needs no network. Ranks of one launch meet in a file that only their user can read, because torch's own
    store listens on every interface of the machine and trusts all who connect. Nodes that share no file which they can
    lock meet at a TCP store, which listens on the address of the cluster alone.

    Raises:
        TrainerError: this process cannot listen at its address, for instance because the port is taken.
    """
    if world_size == 1:
        return dist.HashStore()
    place = environ.get(STORE_VARIABLE)
    if place is None:
        return None
    if place.startswith("tcp://"):
        host, _, port = place.removeprefix("tcp://").rpartition(":")
        try:
            return tcp_store(host, int(port), is_master=environ["RANK"] == "0", timeout=timeout)
        except OSError as error:
            # torch's own store raises a DistError instead.
            raise TrainerError(
                f"rank 0 cannot listen for the other ranks at {host}:{port}: {error.strerror}; start the run again"
            ) from error
    # A person who copies the commands of a dry run needs the directory, too.
    Path(place).parent.mkdir(mode=0o700, exist_ok=True)
    return dist.FileStore(place, world_size)


_VALUES: tuple[object, ...] = (
    collections.OrderedDict,
    pathlib.PosixPath,
    torch.Size,
    torch.device,
    torch.serialization._get_layout,
    traceback.FrameSummary,
    traceback.StackSummary,
)
"""Classes and functions without effects that torch pickles by name."""

_RAISED_BY = ("builtins", "_pickle", "json", "pickle", "prime_rl", "safetensors", "torch", "zipfile")
"""Packages whose exceptions a rank may report to the others."""


class ForbiddenPickle(pickle.UnpicklingError):
    """A pickle names something other than plain values and torch's records of a checkpoint."""


class RankError(Exception):
    """Stands for an exception of another rank whose class is not loaded."""


class PlainUnpickler(pickle.Unpickler):
    """Loads plain values, exceptions, and the records that torch exchanges and saves for checkpoints.

    Raises:
        ForbiddenPickle: the pickle names anything else. Nothing has run then.
    """

    def find_class(self, module: str, name: str) -> Any:
        # Modules are looked up, not imported. A dotted name would reach what a module imports, such as `os.system`.
        found = getattr(sys.modules.get(module), name, None) if "." not in name else None
        if _is_plain(found, module):
            return found
        if isinstance(found, type) and issubclass(found, BaseException):
            return RankError
        raise ForbiddenPickle(f"a pickle names {module}.{name}, which may not be loaded")


def exchange_plain_objects() -> None:
    """Make the object collectives of torch load what they receive with `PlainUnpickler`.

    Raises:
        AttributeError: this torch unpickles in another way, and ranks would trust each other's pickles.
    """
    if not hasattr(c10d, "_unpickler"):
        raise AttributeError(
            "torch.distributed.distributed_c10d has no _unpickler: this torch unpickles in another way"
        )
    c10d._unpickler = PlainUnpickler


def _is_plain(found: object, module: str) -> bool:
    if isinstance(found, torch.dtype) or any(found is value for value in _VALUES):
        return True
    if not isinstance(found, type) or found.__module__ != module:
        return False
    if issubclass(found, BaseException):
        return module.partition(".")[0] in _RAISED_BY
    is_named_tuple = issubclass(found, tuple) and hasattr(found, "_fields")
    is_record = dataclasses.is_dataclass(found) or issubclass(found, enum.Enum) or is_named_tuple
    return is_record and module.startswith("torch.distributed.checkpoint.")


DeviceChoice = Literal["auto", "cuda", "cpu"]

QUIET_S = 10.0
"""Ranks that start together find each other in less time."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the trainer.

    It decides who logs and writes files, and where tensors go. Which rows a process trains on is decided by its
    `DataAxis`: several processes may share rows.
    """

    rank: int
    """Among all processes of the trainer."""
    world_size: int
    local_rank: int
    """Among those on this machine."""
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True for the one process that writes logs, metrics and exports."""
        return self.rank == 0


def resolve_device(device: DeviceChoice) -> Literal["cuda", "cpu"]:
    """The kind of device to train on.

    Raises:
        TrainerError: `device` is "cuda" and no GPU is visible.
    """
    visible = torch.cuda.is_available()
    if device == "cuda" and not visible:
        raise TrainerError('device = "cuda", but this process sees no GPU: check CUDA_VISIBLE_DEVICES, or use "cpu"')
    return "cuda" if visible and device != "cpu" else "cpu"


def setup_world(device: DeviceChoice, timeout_s: int, environ: Mapping[str, str] = os.environ) -> Process:
    """Join the process group: NCCL for GPUs, gloo for the CPU.

    Ranks come from torchrun's environment variables, and the process ends when torchrun does. Without these variables
    the process is alone, and an in-memory store replaces the network: it opens no port.

    Raises:
        TrainerError: the machine lacks the device.
        TrainerError: the other ranks do not come within `timeout_s`.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        _die_with_parent()
    kind = resolve_device(device)
    rank, world_size, local_rank = (int(environ.get(key, d)) for key, d in _TORCHRUN_DEFAULTS)
    if kind == "cuda" and local_rank >= torch.cuda.device_count():
        raise TrainerError(f"process {local_rank} has no GPU of its own: only {torch.cuda.device_count()} are visible")
    target = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cpu":
        map_large_tensors()
    if kind == "cuda":
        torch.cuda.set_device(target)
        torch.set_float32_matmul_precision("high")
    exchange_plain_objects()
    timeout = timedelta(seconds=timeout_s)
    address = f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
    with _waiting_for_ranks(rank, world_size, address, timeout_s):
        store = open_store(environ, world_size, timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
            store=store,
            rank=-1 if store is None else rank,
            world_size=-1 if store is None else world_size,
            timeout=timeout,
            device_id=target if kind == "cuda" else None,
        )
    process = Process(rank, world_size, local_rank, target)
    if process.is_main and kind == "cpu":
        counts = f"{count_of('process', world_size, 'es')}, {count_of('thread', torch.get_num_threads())}"
        get_logger().info(f"Training on the CPU: {counts}{' each' * (world_size > 1)}")
    return process


@contextmanager
def _waiting_for_ranks(rank: int, world_size: int, address: str, timeout_s: int) -> Iterator[None]:
    """Name what the process waits for while the block joins the group; torch itself waits without a word."""
    wait = Wait(
        f"the other ranks of the trainer at {address} ({world_size} in all, this is rank {rank})",
        "start the missing ranks, on every node, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
        timeout_s,
        "dist_timeout_seconds",
    )
    reminder = Timer(QUIET_S, wait.is_over)
    reminder.daemon = True
    reminder.start()
    try:
        yield
    except dist.DistError as error:
        # Of several lines, the rest are torch's C++ frames.
        raise TrainerError(f"{wait.fault}; torch says: {str(error).splitlines()[0]}") from error
    finally:
        reminder.cancel()


def sum_over_processes(values: Sequence[float], process: Process) -> list[float]:
    """Each of `values` summed over all processes, in float64. Collective.

    For sums over rows or shares of a loss use `DataAxis.sum`.
    """
    if process.world_size == 1:
        return list(values)
    totals = torch.tensor(values, dtype=torch.float64, device=process.device)
    dist.all_reduce(totals)
    return totals.tolist()


@contextmanager
def joined_world(device: DeviceChoice, timeout_s: int) -> Iterator[Process]:
    """Join the process group for the block.

    Raises:
        TrainerError: as `setup_world`.
    """
    own_beats().say("waiting for the other ranks")
    process = setup_world(device, timeout_s)
    with leaving_when_done(process):
        yield process


@contextmanager
def leaving_when_done(process: Process) -> Iterator[None]:
    """Leave the process group when the block ends, but not when it raises, unless this process is alone.

    Leaving an NCCL group waits for the other ranks, which may sit in a collective that needs this one. The exception
    would be logged after that, if at all. A process that fails is about to exit, which closes its connections.
    """
    try:
        yield
    except BaseException:
        if process.world_size == 1:
            destroy_world()
        raise
    destroy_world()


def destroy_world() -> None:
    """Leave the process group, if there is one. Every rank must do so."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _die_with_parent() -> None:
    """Receive SIGTERM when torchrun ends, even by SIGKILL. Linux only."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # torchrun may have died before the call, and then nothing is sent. If it died after `getppid`, there is another
    # parent now. If it died earlier, its store is gone and joining the group fails.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


_TORCHRUN_DEFAULTS = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
