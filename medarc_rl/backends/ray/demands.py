"""What a config asks of a Ray cluster. Imports no Ray."""

from __future__ import annotations

from typing import Any

from medarc_rl.deployment import sft_gpus
from prime_rl.configs.sft import SFTConfig
from prime_rl.launch.plan import eval_demand, rl_demand, sft_demand
from prime_rl.launch.site import Demand


def gpus_of(config: Any, single_gpu: bool) -> list[int]:
    """GPUs of each node of a run; inference nodes come first.

    Raises:
        UsageError: a node does not have as many.
    """
    if isinstance(config, SFTConfig):
        sft_gpus(config)
    demand = _demand(config)
    return [1 + sum(demand.frozen)] if single_gpu and demand.nodes == 1 else list(demand.gpus_of_nodes)


def device_of(config: Any) -> str:
    """`auto`, `cuda` or `cpu`."""
    return _demand(config).device


def _demand(config: Any) -> Demand:
    demands = {"sft": sft_demand, "rl": rl_demand, "eval": eval_demand}
    return demands[config.component](config)  # type: ignore[operator, no-any-return]
