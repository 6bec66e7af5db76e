"""This process of the trainer, and the group that connects all of them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from prime_rl.trainer.process.errors import DeviceError
from prime_rl.trainer.process.host_memory import map_large_tensors
from prime_rl.trainer.process.store import open_store
from prime_rl.utils.logger import get_logger

DeviceChoice = Literal["auto", "cuda", "cpu"]

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
        DeviceError: `device` is "cuda" and no GPU is visible.
    """
    visible = torch.cuda.is_available()
    if device == "cuda" and not visible:
        raise DeviceError('device = "cuda", but this process sees no GPU: check CUDA_VISIBLE_DEVICES, or use "cpu"')
    return "cuda" if visible and device != "cpu" else "cpu"


def setup_world(device: DeviceChoice, timeout_s: int, environ: Mapping[str, str] = os.environ) -> Process:
    """Join the process group: NCCL for GPUs, gloo for the CPU.

    Ranks come from torchrun's environment variables, and the process ends when torchrun does. Without these variables
    the process is alone, and an in-memory store replaces the network: it opens no port.

    Raises:
        DeviceError: the machine lacks the device.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        _die_with_parent()
    kind = resolve_device(device)
    rank, world_size, local_rank = (int(environ.get(key, d)) for key, d in _TORCHRUN_DEFAULTS)
    if kind == "cuda" and local_rank >= torch.cuda.device_count():
        raise DeviceError(f"process {local_rank} has no GPU of its own: {torch.cuda.device_count()} are visible")
    target = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cpu":
        map_large_tensors()
    if kind == "cuda":
        torch.cuda.set_device(target)
        torch.set_float32_matmul_precision("high")
    timeout = timedelta(seconds=timeout_s)
    store = open_store(environ, rank, world_size, timeout)
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
        processes = "one process" if world_size == 1 else f"{world_size} processes"
        get_logger().info(f"Training on the CPU with {processes} ({torch.get_num_threads()} threads each)")
    return process


def sum_over_processes(values: Sequence[float], process: Process) -> list[float]:
    """Each of `values` summed over all processes, in float64. Collective.

    For sums over rows or shares of a loss use `DataAxis.sum`.
    """
    if process.world_size == 1:
        return list(values)
    totals = torch.tensor(values, dtype=torch.float64, device=process.device)
    dist.all_reduce(totals)
    return totals.tolist()


def destroy_world() -> None:
    """Leave the process group, if there is one."""
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
