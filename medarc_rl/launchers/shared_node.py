"""Settings of launches on a node that others use too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from medarc_rl.errors import UsageError
from prime_rl.launch.placement import Sharing
from prime_rl.utils.errors import DeviceError
from prime_rl.utils.gpus import MASK_VARIABLE, choose_device, machine_gpus, masked_gpus, usable_gpus

SINGLE_GPU_VARIABLE = "MEDARC_SINGLE_GPU"
"""`1`: each GPU serves and trains, one or, by `deployment.num_train_gpus`, several."""


def shared_node(env: Mapping[str, str], exact_gpus: bool = False) -> Sharing:
    """Free ports, and the same GPUs for both sides if `MEDARC_SINGLE_GPU` is 1."""
    return Sharing(
        free_ports=True,
        exact_gpus=exact_gpus,
        shares_gpus=env.get(SINGLE_GPU_VARIABLE) == "1",
    )


def first_gpus(
    requested: Literal["auto", "cuda", "cpu"], count: int, env: Mapping[str, str], dev: Path = Path("/dev")
) -> tuple[str, ...]:
    """Ids of the first `count` visible GPUs. On a CPU they only count processes.

    Raises:
        UsageError: too few GPUs are visible, or none although `cuda` is requested.
    """
    try:
        usable = usable_gpus(env, dev)
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
        return usable[:count]
    if named == () and machine_gpus(dev):  # hidden on purpose: ids would make them visible again
        return ()
    if named is not None and len(named) >= count:
        return named[:count]
    return tuple(map(str, range(count)))
