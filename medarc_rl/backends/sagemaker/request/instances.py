"""How many GPUs an instance type has."""

from __future__ import annotations

import re

_BY_SIZE: dict[str, dict[str, int]] = {
    # Sizes of a family that have more than one GPU; every other size has one.
    "p2": {"8xlarge": 8, "16xlarge": 16},
    "p3": {"8xlarge": 4, "16xlarge": 8},
    "p3dn": {"24xlarge": 8},
    "p4d": {"24xlarge": 8},
    "p4de": {"24xlarge": 8},
    "p5": {"48xlarge": 8},
    "p5e": {"48xlarge": 8},
    "p5en": {"48xlarge": 8},
    "p6-b200": {"48xlarge": 8},
    "p6-b300": {"48xlarge": 8},
    "p6e-gb200": {"36xlarge": 4},
    "g4dn": {"12xlarge": 4},
    "g5": {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
    "g6": {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
    "g6e": {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
}
_TYPE = re.compile(r"ml\.(?P<family>[a-z0-9-]+)\.(?P<size>[a-z0-9]+)")
_WITHOUT_GPUS = re.compile(r"[cmrt]\d[a-z]*(-flex)?")


def gpus_of(instance_type: str) -> int | None:
    """Number of GPUs of one instance; None if this table does not know the type."""
    match = _TYPE.fullmatch(instance_type)
    if match is None:
        return None
    if match["family"] in _BY_SIZE:
        return _BY_SIZE[match["family"]].get(match["size"], 1)
    return 0 if _WITHOUT_GPUS.fullmatch(match["family"]) else None


def smallest_with(gpus: int, family: str) -> str | None:
    """The smallest instance type of a family with at least so many GPUs."""
    sizes = sorted(_BY_SIZE.get(family, {}).items(), key=lambda item: (item[1], item[0]))
    return next((f"ml.{family}.{size}" for size, count in sizes if count >= gpus), None)


def family_of(instance_type: str) -> str:
    match = _TYPE.fullmatch(instance_type)
    return match["family"] if match else ""
