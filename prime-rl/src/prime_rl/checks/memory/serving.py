"""Memory of one GPU of the inference server: weights, key-value cache, reserve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prime_rl.checks.memory.shapes import ModelShape, count

Engine = Literal["vllm", "embedded"]

_GIB = 2**30
_VLLM_TOKENS = 8192
"""Tokens of vLLM's largest step on GPUs of the data center."""
_EMBEDDED_TOKENS = 4096
_EMBEDDED_ROWS = 128
_ROW_STEP = 16
_FIRST_LENGTH = 128
_CUDA_GRAPHS_BYTES = _GIB
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Serving:
    """What one GPU of an engine holds."""

    shape: ModelShape
    engine: Engine
    weight_bytes: int
    """Size of one parameter."""
    max_len: int
    """Longest sequence, in tokens."""
    in_flight: int
    """Sequences that the run keeps in flight, of all copies of the model."""
    tp: int
    dp: int
    has_graphs: bool

    is_packed: bool = False
    """The embedded engine keeps a second copy of the blocks' matrices, as its kernels for CPUs read them."""

    @property
    def weights(self) -> int:
        packed = sum(map(count, self.shape.blocks)) if self.is_packed else 0
        return (self.shape.parameters + packed) * self.weight_bytes // self.tp

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token, in all layers."""
        shape = self.shape
        if rank := shape.config.get("kv_lora_rank") if self.engine == "vllm" else None:
            return int(shape.layers * (rank + shape.config.get("qk_rope_head_dim", 0)) * self.weight_bytes)
        heads = -(-shape.kv_heads // self.tp)
        return shape.layers * heads * (shape.key_dim + shape.value_dim) * self.weight_bytes

    @property
    def sequences(self) -> int:
        """Sequences in flight on one copy of the model."""
        return max(1, -(-self.in_flight // self.dp))

    @property
    def one_sequence(self) -> int:
        return self.max_len * self.token_bytes

    @property
    def working(self) -> int:
        """Activations and logits of the largest step, and CUDA graphs."""
        shape = self.shape
        tokens = _VLLM_TOKENS if self.engine == "vllm" else _EMBEDDED_TOKENS
        inner = int(shape.config.get("intermediate_size") or 4 * shape.hidden)
        step = tokens * (4 * shape.hidden + 3 * inner // self.tp) * self.weight_bytes
        rows = 256 if self.engine == "vllm" else min(self.sequences, _EMBEDDED_ROWS)
        logits = 3 * _FLOAT32 * rows * shape.vocab
        return step + logits + (_CUDA_GRAPHS_BYTES if self.has_graphs else 0)

    def cache(self, budget_bytes: int | None) -> int:
        """The key-value cache of an engine with `budget_bytes` for it; None if that is not known."""
        wanted = self.sequences * self.one_sequence
        if budget_bytes is None:
            return wanted
        if self.engine == "vllm":
            return max(0, budget_bytes)
        rows = -(-min(self.sequences, _EMBEDDED_ROWS) // _ROW_STEP) * _ROW_STEP
        length = max(_FIRST_LENGTH, 1 << (self.max_len - 1).bit_length())
        return max(0, min(budget_bytes, rows * length * self.token_bytes))
