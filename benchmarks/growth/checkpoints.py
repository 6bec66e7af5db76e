"""Checkpoints of models of many sizes: weights and AdamW's states in float32, 12 bytes for each parameter.

uv run benchmarks/growth/checkpoints.py
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from measure import Action, Cost, measure_from_command_line, tens
from small_models import checkpoint, llama

LAYERS, VOCABULARY = 4, 512


def config_of(parameters: int) -> dict[str, Any]:
    """A Llama of four layers with about as many parameters: 12 h^2 a layer, and 2 V h."""
    hidden = 16
    while LAYERS * 12 * (hidden + 16) ** 2 + 2 * VOCABULARY * (hidden + 16) <= parameters:
        hidden += 16
    return llama(
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 16,
        vocab_size=VOCABULARY,
    )


def begin(loads: bool, size: int, folder: Path) -> Action:
    return checkpoint(loads, config_of(size), folder)


COSTS = [
    Cost("checkpoint-save", "parameters", tens(5, 8), partial(begin, False), repeats=False),
    Cost("checkpoint-load", "parameters", tens(5, 8), partial(begin, True), repeats=False),
]

if __name__ == "__main__":
    measure_from_command_line(__doc__, COSTS)
