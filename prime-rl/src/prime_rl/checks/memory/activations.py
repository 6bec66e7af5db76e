"""Memory that a decoder block's forward pass keeps for its backward pass, per token.

Counted from the operations that autograd records: Transformers' modules on a GPU, our own kernels on a CPU
(`trainer/kernels`), which keep less.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from prime_rl.checks.memory.families import Tensors
from prime_rl.checks.memory.shapes import ModelShape
from prime_rl.configs.model import LoRAConfig, is_regex

_FLOAT32 = 4
_MLP_GRADIENTS, _LEAN_MLP_GRADIENTS = 2, 4
"""Gradients of the inner width that exist at the same time as what they are computed from."""


@dataclass(frozen=True, slots=True)
class Precision:
    """What decides the size of saved tensors, besides the model."""

    compute_bytes: int
    is_lean: bool
    """Our kernels for CPUs replace norms and SwiGLU layers."""


@dataclass(frozen=True, slots=True)
class BlockActivations:
    """Bytes per token of one decoder block."""

    saved: int
    """Kept from the forward pass to the backward pass."""
    input: int
    """Kept if the block is recomputed."""
    temporary: int
    """Gradients inside the block, at the peak of its backward pass."""


def block_activations(
    shape: ModelShape, block: Tensors, precision: Precision, lora: LoRAConfig | None = None
) -> BlockActivations:
    """What one block needs per token of a row."""
    size, hidden = precision.compute_bytes, shape.hidden
    inner = _inner_width(shape, block)
    saved = _norms(shape, block, precision, lora) + _attention(shape, size) + _mlp(shape, block, precision, lora)
    if lora is not None:
        saved += sum(size * lora.rank for path in linear_paths(block) if is_target(lora, path))
    gradients = _LEAN_MLP_GRADIENTS if precision.is_lean else _MLP_GRADIENTS
    temporary = size * (gradients * inner + hidden)
    return BlockActivations(saved, size * hidden, temporary)


def linear_paths(block: Tensors) -> list[str]:
    """Paths of the linear layers of a block, without experts."""
    names = [name for name, shape in block.items() if len(shape) == 2]
    return [name.removesuffix(".weight") for name in names]


def is_target(lora: LoRAConfig, path: str) -> bool:
    """Whether a module gets an adapter, by the rules of `trainer/model/lora.py`."""

    def matches(pattern: str) -> bool:
        return re.search(pattern, path) is not None if is_regex(pattern) else f".{pattern}." in f".{path}."

    return any(map(matches, lora.target_modules)) and not any(map(matches, lora.modules_to_save))


def _norms(shape: ModelShape, block: Tensors, precision: Precision, lora: LoRAConfig | None) -> int:
    """RMSNorm keeps a float32 copy, the normalized values, and its output where a matrix product reads it."""
    size = precision.compute_bytes
    inside = size if precision.is_lean else _FLOAT32 + (size if lora is None else 0)
    total = 0
    for name, width in _norm_widths(shape, block):
        feeds_product = width == shape.hidden and "post" not in name
        total += width * (inside + size * feeds_product)
    return total


def _norm_widths(shape: ModelShape, block: Tensors) -> list[tuple[str, int]]:
    widths = []
    for name, size in block.items():
        if len(size) == 1 and "norm" in name and name.endswith("weight"):
            is_head = "q_norm" in name or "k_norm" in name
            heads = shape.heads if "q_norm" in name else shape.kv_heads
            widths.append((name, size[0] * heads if is_head and size[0] == shape.key_dim else size[0]))
    return widths


def _attention(shape: ModelShape, size: int) -> int:
    """Rotated queries and keys, values, the output, and a float32 log-sum-exp for each head."""
    queries, keys = shape.heads * shape.key_dim, shape.kv_heads * shape.key_dim
    values, output = shape.kv_heads * shape.value_dim, shape.heads * shape.value_dim
    return size * (queries + keys + values + output) + _FLOAT32 * shape.heads


def _mlp(shape: ModelShape, block: Tensors, precision: Precision, lora: LoRAConfig | None) -> int:
    """Gate, its activation, up, and their product; lean layers recompute two of the four."""
    names = " ".join(block)
    is_gated = "gate_proj" in names or "gate_up_proj" in names or ".experts." in names
    has_lean_mlp = precision.is_lean and lora is None and "mlp.gate_proj" in names
    kept = (2 if has_lean_mlp else 4) if is_gated else 2
    # A token visits its experts as copies, whose outputs are kept for the gradient of the router.
    is_sparse = any(len(size) == 3 for size in block.values())
    copies = 2 * shape.hidden * _experts_per_token(shape) if is_sparse else 0
    return precision.compute_bytes * (kept * _inner_width(shape, block) + copies)


def _inner_width(shape: ModelShape, block: Tensors) -> int:
    """Inner width that a token passes: of the dense layer, or of its experts and the shared ones."""
    width = 0
    for name, size in block.items():
        path = name.removesuffix(".weight")
        if len(size) == 1:
            continue
        if len(size) == 3:
            config = shape.config
            each = config.get("moe_intermediate_size") or config.get("intermediate_size") or size[-2]
            width += int(each) * _experts_per_token(shape) * path.endswith(("down_proj", "w2"))
        elif path.endswith("gate_up_proj"):
            width += size[0] // 2
        elif path.endswith((".up_proj", ".c_fc", ".fc1", ".dense_h_to_4h")):
            # GPT-2 stores its matrices transposed.
            width += max(size)
    return width


def _experts_per_token(shape: ModelShape) -> int:
    return int(shape.config.get("num_experts_per_tok") or 1)
