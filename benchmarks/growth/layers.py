"""What grows with the number of a model's layers, each of 9 small tensors: building, the first update, checkpoints.

uv run benchmarks/growth/layers.py
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from measure import Action, Cost, measure_from_command_line
from small_models import builder, checkpoint, llama

SIZES = (8, 32, 128, 512)


def config_of(layers: int) -> dict[str, Any]:
    return llama(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=64,
    )


def building(size: int, folder: Path) -> Action:
    build, _ = builder(config_of(size), folder)

    def work() -> None:
        build()

    return work


def first_update(size: int, folder: Path) -> Action:
    build, _ = builder(config_of(size), folder)

    from prime_rl.trainer.optim.optimizer import clip_gradients

    trained = build().policy

    def work() -> None:
        clip_gradients(trained.model, 1.0)
        trained.optimizer.step()

    return work


def checkpointing(loads: bool, size: int, folder: Path) -> Action:
    return checkpoint(loads, config_of(size), folder)


COSTS = [
    Cost("layers-build", "layers", SIZES, building, repeats=False),
    Cost("layers-first-update", "layers", SIZES, first_update, repeats=False),
    Cost("layers-save", "layers", SIZES, partial(checkpointing, False), repeats=False),
    Cost("layers-load", "layers", SIZES, partial(checkpointing, True), repeats=False),
]

if __name__ == "__main__":
    measure_from_command_line(__doc__, COSTS)
