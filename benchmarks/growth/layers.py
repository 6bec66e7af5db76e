"""What grows with the number of a model's layers, each of 9 small tensors: building, the first step, checkpoints.

uv run benchmarks/growth/layers.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from measure import Action, Cost, measure_from_command_line

SIZES = (8, 32, 128, 512)
VOCABULARY = 64


def config_of(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": VOCABULARY,
    }


def begin(work_of: Callable[[Any, Any, Path], Action], size: int, folder: Path) -> Action:
    """`work_of` gets a function that builds the model and its optimizer, and the mesh."""
    import torch

    from prime_rl.configs.trainer import AdamWConfig, ConstantSchedulerConfig, ModelConfig
    from prime_rl.trainer.checkpoints.state import TrainedModel, TrainState
    from prime_rl.trainer.model.build import setup_model
    from prime_rl.trainer.optim.optimizer import setup_optimizer
    from prime_rl.trainer.optim.scheduler import setup_scheduler
    from prime_rl.trainer.process.parallel_dims import ParallelDims
    from prime_rl.trainer.process.world import setup_world

    (folder / "config.json").write_text(json.dumps(config_of(size)))
    mesh = ParallelDims(1, 1).mesh(setup_world("cpu", timeout_s=600, environ={}))

    def built() -> TrainState:
        model = setup_model(ModelConfig(name=str(folder), attn="sdpa", debug={"random_init": True}), mesh)
        optimizer = setup_optimizer(AdamWConfig(), model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        scheduler = setup_scheduler(ConstantSchedulerConfig(), optimizer, 9)
        return TrainState({"policy": TrainedModel(model, optimizer, scheduler)})

    return work_of(built, mesh, folder)


def building(built: Any, mesh: Any, folder: Path) -> Action:
    def work() -> None:
        built()

    return work


def first_update(built: Any, mesh: Any, folder: Path) -> Action:
    from prime_rl.trainer.optim.optimizer import clip_gradients

    trained = built().policy

    def work() -> None:
        clip_gradients(trained.model, 1.0)
        trained.optimizer.step()

    return work


def checkpoint(loads: bool, built: Any, mesh: Any, folder: Path) -> Action:
    from prime_rl.configs.trainer import CheckpointConfig
    from prime_rl.run.paths import RunPaths
    from prime_rl.trainer.checkpoints.manager import CheckpointManager
    from prime_rl.trainer.checkpoints.reading import read_sharded  # noqa: F401 - so that its import is not measured

    state = built()
    state.policy.optimizer.step()
    state.policy.optimizer.zero_grad()
    manager = CheckpointManager(CheckpointConfig(), RunPaths(folder / "run"), mesh.process, mesh.data_axis)
    if loads:
        manager.save(state, {})

    def work() -> None:
        if loads:
            manager.load(state, 0)
        else:
            manager.save(state, {})

    return work


WORK = {
    "build": building,
    "first-update": first_update,
    "save": partial(checkpoint, False),
    "load": partial(checkpoint, True),
}
COSTS = [
    Cost(f"layers-{name}", "layers", SIZES, partial(begin, work_of), repeats=False) for name, work_of in WORK.items()
]

if __name__ == "__main__":
    measure_from_command_line(__doc__, COSTS)
