"""Which GPU of a job goes to which child. Ids stay the text that Slurm or the user gave: `0`, `GPU-…`, `MIG-…`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from medarc_rl.errors import UsageError
from prime_rl.launch.devices import MASK_VARIABLE, GpuAssignment, assign_gpus

SINGLE_GPU_VARIABLE = "MEDARC_SINGLE_GPU"
"""`1`: inference and trainer share the one GPU."""


def split_gpus(gpus: Sequence[str], infer: int, train: int, single: bool) -> GpuAssignment:
    """The first `infer` ids to inference, the next `train` to the trainer; in single-GPU mode the one to both.

    Raises:
        UsageError: these are not exactly as many as the run needs.
    """
    needed = 1 if single else infer + train
    if len(gpus) != needed:
        wanted = "single-GPU mode needs 1" if single else f"{infer} inference + {train} training GPUs are {needed}"
        raise UsageError(
            f"{wanted}, but {len(gpus)} can be used here ({','.join(gpus) or 'none'}): "
            f"set {MASK_VARIABLE} to the ones to use"
        )
    return GpuAssignment(tuple(gpus), tuple(gpus)) if single else assign_gpus(gpus, infer, train)


def mask_for_vllm(gpus: Sequence[str], indices: Mapping[str, str]) -> dict[str, str]:
    """The environment that shows vLLM these GPUs: it reads the mask as integers and crashes on a `GPU-…` id.

    Ids are replaced by their index in PCI order (`indices`, by id), which the child is then told to use. When one has
    none - a MIG slice, or nvidia-smi is missing - all stay as given, since indices and ids do not mix.
    """
    if all(gpu.isdigit() for gpu in gpus):
        return {MASK_VARIABLE: ",".join(gpus)}
    translated = [_index_of(gpu, indices) for gpu in gpus]
    if None in translated:
        return {MASK_VARIABLE: ",".join(gpus)}
    return {MASK_VARIABLE: ",".join(translated), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _index_of(gpu: str, indices: Mapping[str, str]) -> str | None:
    # CUDA takes the beginning of an id for the whole, as long as it fits only one.
    matches = [index for uuid, index in indices.items() if uuid.startswith(gpu)]
    return matches[0] if len(matches) == 1 else None
