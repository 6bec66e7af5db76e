"""Checkpoints of models of many sizes: weights and AdamW's states in float32, 12 bytes for each parameter.

uv run benchmarks/growth/checkpoints.py
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from measure import Action, Cost, measure_from_command_line, tens

LAYERS, VOCABULARY = 4, 512


def config_of(parameters: int) -> dict[str, object]:
    """A Llama of four layers with about as many parameters: 12 h^2 a layer, and 2 V h."""
    hidden = 16
    while LAYERS * 12 * (hidden + 16) ** 2 + 2 * VOCABULARY * (hidden + 16) <= parameters:
        hidden += 16
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": hidden // 16,
        "num_key_value_heads": hidden // 16,
        "vocab_size": VOCABULARY,
    }


def begin(loads: bool, size: int, folder: Path) -> Action:
    import torch

    from prime_rl.configs.trainer import AdamWConfig, CheckpointConfig, ConstantSchedulerConfig, ModelConfig
    from prime_rl.run.paths import RunPaths
    from prime_rl.trainer.checkpoints.manager import CheckpointManager
    from prime_rl.trainer.checkpoints.reading import read_sharded  # noqa: F401 - so that its import is not measured
    from prime_rl.trainer.checkpoints.state import TrainedModel, TrainState
    from prime_rl.trainer.model.build import setup_model
    from prime_rl.trainer.optim.optimizer import setup_optimizer
    from prime_rl.trainer.optim.scheduler import setup_scheduler
    from prime_rl.trainer.process.parallel_dims import ParallelDims
    from prime_rl.trainer.process.world import setup_world

    (folder / "config.json").write_text(json.dumps(config_of(size)))
    mesh = ParallelDims(1, 1).mesh(setup_world("cpu", timeout_s=600, environ={}))
    model = setup_model(ModelConfig(name=str(folder), attn="sdpa", debug={"random_init": True}), mesh)
    optimizer = setup_optimizer(AdamWConfig(), model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = TrainState(
        {"policy": TrainedModel(model, optimizer, setup_scheduler(ConstantSchedulerConfig(), optimizer, 9))}
    )
    paths = RunPaths(folder / "run")
    manager = CheckpointManager(CheckpointConfig(), paths, mesh.process, mesh.data_axis)
    if loads:
        manager.save(state, {})

    def work() -> None:
        if loads:
            manager.load(state, 0)
        else:
            manager.save(state, {})

    return work


COSTS = [
    Cost("checkpoint-save", "parameters", tens(5, 8), partial(begin, False), repeats=False),
    Cost("checkpoint-load", "parameters", tens(5, 8), partial(begin, True), repeats=False),
]

if __name__ == "__main__":
    measure_from_command_line(__doc__, COSTS)
