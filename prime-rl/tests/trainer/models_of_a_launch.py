"""Started by `test_models_of_a_launch.py` as a single process, and with two processes under torchrun.

Arguments: a file for the results, a port, and models' directories. Saves of each model, built in bfloat16: the weights
as they are exported, the names of those that are trained, and the log-probability of a token. Two processes also
publish each model, of which they divide the experts, in files beside its own, and through the port to two others.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prime_rl.configs.trainer import FileSystemWeightBroadcastConfig, ModelConfig, NCCLWeightBroadcastConfig
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.checkpoints.weights import gather_weights
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.scoring import score_tokens
from prime_rl.trainer.process.errors import leaving_at_once
from prime_rl.trainer.process.mesh import setup_mesh
from prime_rl.trainer.process.world import Process, destroy_world, setup_world
from prime_rl.trainer.rl.broadcast import FileSystemBroadcast, GroupBroadcast

TOKENS = torch.arange(4, 34)[None]


def described(directory: str, process: Process, direct: GroupBroadcast, version: int) -> dict[str, Any]:
    config = ModelConfig(name=directory, attn="sdpa", seq_len=64, optimization_dtype="bfloat16")
    if process.world_size == 2 and "expert" in directory:
        config = config.model_copy(update={"ep": 2})
    model = setup_model(config, setup_mesh(config, process))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    def logprob(hidden: Tensor, logits_of: Any) -> Tensor:
        return logits_of(hidden[-1:]).float().log_softmax(-1)[0, 7]

    with torch.no_grad():
        scored = score_tokens(model, TOKENS, torch.arange(30)[None], logprob).item()
    if process.world_size == 2:
        files = FileSystemBroadcast(FileSystemWeightBroadcastConfig(), RunPaths(Path(directory)), process, 1)
        files.publish(model, 1, torch.bfloat16)
        direct.publish(model, version, torch.bfloat16)
    return {"weights": gather_weights(model, torch.bfloat16), "trained": sorted(trained), "logprob": scored}


def main(results: Path, port: int, directories: list[str]) -> None:
    process = setup_world("cpu", timeout_s=3600)
    config = NCCLWeightBroadcastConfig(host="127.0.0.1", port=port, timeout=3600, inference_world_size=2)
    run = RunPaths(results.parent).orchestrator
    direct = GroupBroadcast(config, run, process, lambda: False)
    if process.world_size == 2:
        direct.start(0)
        for version in range(len(directories)) if process.is_main else ():
            run.broadcast(version).mkdir(parents=True)
            run.broadcast_ready(version).touch()
    found = {
        Path(directory).name: described(directory, process, direct, version)
        for version, directory in enumerate(directories)
    }
    if process.is_main:
        torch.save(found, results)
    destroy_world()


with leaving_at_once():
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
