"""Finds the GPUs of this machine that a program may use, without torch. Ids are opaque text: `0`, `GPU-…`, `MIG-…`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from prime_rl.utils.errors import DeviceError

MASK_VARIABLE = "CUDA_VISIBLE_DEVICES"

_NO_DEVICES = ("", "-1", "NoDevFiles")
"""Values with which CUDA, users and Slurm say that there is no GPU."""


def masked_gpus(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """The ids in CUDA_VISIBLE_DEVICES, unchanged; None if it is not set.

    Raises:
        DeviceError: an id occurs twice.
    """
    if MASK_VARIABLE not in env:
        return None
    gpus = []
    for gpu in (part.strip() for part in env[MASK_VARIABLE].split(",")):
        if gpu in _NO_DEVICES:  # like CUDA, which stops reading at the first invalid id
            break
        gpus.append(gpu)
    if len(set(gpus)) != len(gpus):
        raise DeviceError(f"{MASK_VARIABLE}={env[MASK_VARIABLE]} lists a GPU twice")
    return tuple(gpus)


def machine_gpus(dev: Path = Path("/dev")) -> tuple[str, ...]:
    """Indices of the machine's NVIDIA GPUs, ignoring any mask."""
    # Not /proc/driver/nvidia: a container without any GPU sees the host's.
    count = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in dev.glob("nvidia*"))
    return tuple(str(index) for index in range(count))


def usable_gpus(env: Mapping[str, str], dev: Path = Path("/dev")) -> tuple[str, ...]:
    """The ids that a launch may use: those in the mask, or all GPUs without a mask."""
    machine = machine_gpus(dev)
    masked = masked_gpus(env)
    return machine if masked is None or not machine else masked


def choose_device(requested: Literal["auto", "cuda", "cpu"], usable: Sequence[str]) -> Literal["cuda", "cpu"]:
    """The device of a run: GPUs if there are any, unless the config says otherwise.

    Raises:
        DeviceError: `cuda` is requested and there is no GPU.
    """
    if requested == "cuda" and not usable:
        raise DeviceError(
            f'device = "cuda", but no GPU can be used here: no /dev/nvidia0, or {MASK_VARIABLE} hides all. '
            'device = "cpu" runs on the CPU'
        )
    return "cuda" if usable and requested != "cpu" else "cpu"
