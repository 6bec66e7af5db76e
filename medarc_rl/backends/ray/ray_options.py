"""Options of `medarc_submit --to ray`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from typer import Option

Strategy = Literal["pack", "spread"]


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Imports nothing but Typer, because every help page needs it."""

    ray_address: Annotated[
        str | None,
        Option(metavar="HOST:PORT", help="ray: address of a running cluster; without it, one on this machine."),
    ] = None
    ray_strategy: Annotated[
        Strategy, Option(help="ray: place the run's nodes on few machines of the cluster, or on many.")
    ] = "pack"
