"""Random Llamas with their optimizers, and their checkpoints, for the costs of training state."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import Action

if TYPE_CHECKING:
    from prime_rl.trainer.checkpoints.state import TrainState
    from prime_rl.trainer.process.mesh import Mesh


def llama(**sizes: int) -> dict[str, Any]:
    """A Transformers config. `sizes` are its keys."""
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes}


def builder(config: Mapping[str, Any], folder: Path) -> tuple[Callable[[], TrainState], Mesh]:
    """A function that builds the model, with gradients of 0, and its AdamW. Imports what it needs now."""
    import torch

    from prime_rl.configs.trainer import AdamWConfig, ConstantSchedulerConfig, ModelConfig
    from prime_rl.trainer.checkpoints.state import TrainedModel, TrainState
    from prime_rl.trainer.model.build import setup_model
    from prime_rl.trainer.optim.optimizer import setup_optimizer
    from prime_rl.trainer.optim.scheduler import setup_scheduler
    from prime_rl.trainer.process.mesh import ParallelDims
    from prime_rl.trainer.process.world import setup_world

    (folder / "config.json").write_text(json.dumps(config))
    mesh = ParallelDims(1, 1).mesh(setup_world("cpu", timeout_s=600, environ={}))

    def build() -> TrainState:
        model = setup_model(ModelConfig(name=str(folder), attn="sdpa", debug={"random_init": True}), mesh)
        optimizer = setup_optimizer(AdamWConfig(), model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        scheduler = setup_scheduler(ConstantSchedulerConfig(), optimizer, 9)
        return TrainState({"policy": TrainedModel(model, optimizer, scheduler)})

    return build, mesh


def checkpoint(loads: bool, config: Mapping[str, Any], folder: Path) -> Action:
    """Load a checkpoint of the model after one update, or save it."""
    build, mesh = builder(config, folder)

    from prime_rl.configs.trainer import CheckpointConfig
    from prime_rl.run.paths import RunPaths
    from prime_rl.trainer.checkpoints.manager import CheckpointManager
    from prime_rl.trainer.checkpoints.sharded import read_sharded  # noqa: F401 - so that its import is not measured

    state = build()
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
