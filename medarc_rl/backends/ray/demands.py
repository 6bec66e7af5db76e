"""What a config asks of a Ray cluster. Imports no Ray."""

from __future__ import annotations

from typing import Any

from medarc_rl.deployment import judge_gpus, sft_gpus, sft_nodes
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.sft import SFTConfig


def gpus_of(config: Any, single_gpu: bool) -> list[int]:
    """GPUs of each node of a run; inference nodes come first."""
    if isinstance(config, OfflineEvalConfig):
        server = config.inference
        return [(0 if server is None else server.parallel.tp * server.parallel.dp) + judge_gpus(config)]
    if isinstance(config, SFTConfig):
        return [sft_gpus(config)] * sft_nodes(config)
    deployment = config.deployment
    if deployment.type == "single_node":
        infer = 0 if config.inference is None else deployment.num_infer_gpus
        return [(1 if single_gpu else infer + deployment.num_train_gpus) + judge_gpus(config)]
    return [deployment.gpus_per_node] * (deployment.num_infer_nodes + deployment.num_train_nodes)


def device_of(config: Any) -> str:
    """`auto`, `cuda` or `cpu`."""
    if isinstance(config, OfflineEvalConfig):
        return "cpu" if config.inference is None else str(config.inference.device)
    return str(config.device)
