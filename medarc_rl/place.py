"""Where a run computes: on the GPUs that this process may use, or on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from medarc_rl.errors import UsageError
from prime_rl.launch.devices import (
    MASK_VARIABLE,
    DeviceError,
    choose_device,
    machine_gpus,
    masked_gpus,
    usable_gpus,
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run computes on this machine."""

    device: Literal["cuda", "cpu"]
    ids: tuple[str, ...]
    """The GPUs to show it, by the ids that the environment gives them. On the CPU they only count processes."""


def find_place(requested: Literal["auto", "cuda", "cpu"], count: int, env: Mapping[str, str]) -> Place:
    """The first `count` of the visible GPUs, or the CPU where there are none.

    Raises:
        UsageError: there are GPUs but fewer, or none although `cuda` is requested.
    """
    try:
        usable = usable_gpus(env)
        device = choose_device(requested, usable)
        named = masked_gpus(env)
    except DeviceError as error:
        raise UsageError(str(error)) from error
    if device == "cuda" and len(usable) < count:
        raise UsageError(
            f"the run takes {count} GPUs, and {len(usable)} can be used here ({','.join(usable)}): "
            f"ask for fewer, or name more in {MASK_VARIABLE}"
        )
    if device == "cuda":
        return Place(device, usable[:count])
    if named == () and machine_gpus():  # hidden on purpose: numbers would show them again
        return Place(device, ())
    if named is not None and len(named) >= count:
        return Place(device, named[:count])
    return Place(device, tuple(map(str, range(count))))
