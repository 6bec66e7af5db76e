"""Assigns GPUs and CPU cores to the processes of a launch, without torch."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from prime_rl.utils.errors import DeviceError
from prime_rl.utils.gpus import MASK_VARIABLE
from prime_rl.utils.limits import THREADS_VARIABLE

SPIN_VARIABLE = "GOMP_SPINCOUNT"

_SPINS = "2000"
"""A few hundredths of a millisecond. Ten times as many make no step shorter, but where another program needs the core,
they make one several times longer."""


@dataclass(frozen=True, slots=True)
class GpuAssignment:
    """The GPUs of inference and trainer, which may share one, and those of each judge and of the teacher."""

    inference: tuple[str, ...] = ()
    trainer: tuple[str, ...] = ()
    frozen: tuple[tuple[str, ...], ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Each GPU once."""
        return tuple(dict.fromkeys((*self.inference, *self.trainer, *chain(*self.frozen))))


def mask(gpus: Sequence[str]) -> dict[str, str]:
    """The environment that shows a child these GPUs and no others."""
    return {MASK_VARIABLE: ",".join(gpus)}


def mask_for_vllm(gpus: Sequence[str], indices: Mapping[str, str]) -> dict[str, str]:
    """The environment that shows vLLM these GPUs. vLLM parses the mask as integers and crashes on a `GPU-…` id.

    Replace ids by their index in PCI order (`indices`, by id), and tell the child to use that order. If an id has no
    index (a MIG slice, or nvidia-smi is missing), keep all ids, because CUDA does not accept a mixture.
    """
    translated = [gpu if gpu.isdigit() else _index_of(gpu, indices) for gpu in gpus]
    known = [index for index in translated if index is not None]
    if all(gpu.isdigit() for gpu in gpus) or len(known) < len(gpus):
        return mask(gpus)
    return mask(known) | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _index_of(gpu: str, indices: Mapping[str, str]) -> str | None:
    # CUDA accepts a prefix of an id as long as it is unique.
    matches = [index for uuid, index in indices.items() if uuid.startswith(gpu)]
    return matches[0] if len(matches) == 1 else None


def assign_gpus(
    usable: Sequence[str],
    infer: int,
    train: int,
    infer_ids: Sequence[int] | None = None,
    train_ids: Sequence[int] | None = None,
    frozen: Sequence[int] = (),
) -> GpuAssignment:
    """Assign the first `infer` usable ids to inference and the next `train` to the trainer, or ids from the config.
    Each judge and the teacher get as many of the rest as `frozen` says.

    Ids in the config may overlap; then both sides share a GPU.

    Raises:
        DeviceError: there are too few GPUs, or a named one is not usable.
    """
    inference = tuple(map(str, infer_ids)) if infer_ids is not None else tuple(usable[:infer])
    free = [gpu for gpu in usable if gpu not in inference]
    trainer = tuple(map(str, train_ids)) if train_ids is not None else tuple(free[:train])
    absent = sorted({*inference, *trainer} - set(usable))
    if absent:
        raise DeviceError(f"GPU {', '.join(absent)} cannot be used here; {_listed(usable)} can")
    if (infer_ids is None and len(inference) < infer) or (train_ids is None and len(trainer) < train):
        raise DeviceError(f"{infer} inference + {train} training GPUs are more than can be used: {_listed(usable)}")
    rest = iter([gpu for gpu in usable if gpu not in {*inference, *trainer}])
    own = tuple(tuple(islice(rest, count)) for count in frozen)
    if [len(each) for each in own] != list(frozen):
        raise DeviceError(
            f"{len(inference)} inference + {len(trainer)} training + {sum(frozen)} GPUs of judges and teacher are more "
            f"than can be used: {_listed(usable)}"
        )
    return GpuAssignment(inference, trainer, own)


def _listed(gpus: Sequence[str]) -> str:
    return ",".join(gpus) or "none"


def thread_env(cores: int, processes: int, env: Mapping[str, str]) -> dict[str, str]:
    """The number of threads for each of several CPU processes, unless `env` sets it."""
    return {} if THREADS_VARIABLE in env else {THREADS_VARIABLE: str(max(1, cores // processes))}


def spin_env(env: Mapping[str, str]) -> dict[str, str]:
    """Let threads spin between two operations, unless `env` sets the duration. Only for a process with its own cores.

    Waking a thread takes longer than the gap. If processes share cores, a spinning thread delays another one. Takes
    effect only in a process that has not loaded torch yet.
    """
    return {} if SPIN_VARIABLE in env else {SPIN_VARIABLE: _SPINS}


def processes_on(gpus: Sequence[str]) -> list[str]:
    """`<pid>, <name>` of each program that computes on one of these GPUs. Also empty if nvidia-smi is not available."""
    answer = _nvidia_smi("--query-compute-apps=pid,name", f"--id={','.join(gpus)}")
    return sorted(set(answer))


def gpu_names(gpus: Sequence[str]) -> list[str]:
    """Models of these GPUs. Empty without GPUs or nvidia-smi."""
    return _nvidia_smi("--query-gpu=name", f"--id={','.join(gpus)}") if gpus else []


def indices_by_uuid() -> dict[str, str]:
    """Index of each usable GPU in PCI order, by its `GPU-…` id. Empty without nvidia-smi."""
    rows = (row.split(",") for row in _nvidia_smi("--query-gpu=index,uuid"))
    return {uuid.strip(): index.strip() for index, uuid in rows}


def _nvidia_smi(*query: str) -> list[str]:
    try:
        answer = subprocess.run(
            ["nvidia-smi", *query, "--format=csv,noheader"], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        # Not installed in slim containers, and gives no answer for MIG slices. Both work without it.
        return []
    return [line for line in answer.stdout.splitlines() if line.strip()]
