"""Memory of the head and the loss: logits, a few at a time, and what their gradients need."""

from __future__ import annotations

from dataclasses import dataclass

from prime_rl.checks.memory.activations import is_target
from prime_rl.checks.memory.shapes import ModelShape
from prime_rl.configs.model import DEFAULT_VOCAB_CHUNK, ModelConfig

_LOGITS = 2**25
"""`Limits.logits` of `trainer/kernels/heads.py`, and `MAX_LOGITS` of `trainer/rl/rows.py`."""
_FLOAT_LOGITS = 2**22
_CACHED_FLOAT_LOGITS = 2**20
_PLAIN_FLOATS = 3
"""Float32 tensors of the model's own head that exist at the same time: log-softmax, its exponentials, a product."""
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class LossMemory:
    """Bytes for one row."""

    forward: int
    """At the peak of the loss's forward pass."""
    kept: int
    """From there through the backward pass of the last block."""


def sft_loss(
    shape: ModelShape, model: ModelConfig, tokens: int, size: int, on_cpu: bool, trains_head: bool
) -> LossMemory:
    """Cross-entropy with `linear_cross_entropy_sum`, which computes gradients together with the loss."""
    vocab, hidden = shape.vocab, shape.hidden
    if not _has_plain_head(shape, model):
        return _plain_head(vocab, hidden, tokens, size)
    rows = max(1, _LOGITS // vocab)
    chunk = min(rows, tokens) * vocab * size
    next_chunk = min(rows, max(0, tokens - rows)) * vocab * size
    most_floats = _CACHED_FLOAT_LOGITS if on_cpu else _FLOAT_LOGITS
    part = max(1, most_floats // vocab)
    # The next part is computed before the last one is freed. Float32 logits need no copy.
    copied = min(part, rows, tokens) + min(part, max(0, min(rows, tokens) - part)) if size < _FLOAT32 else 0
    floats = _FLOAT32 * vocab * copied
    states = tokens * hidden * size
    head = vocab * hidden
    if not trains_head:
        return LossMemory(3 * states + chunk + next_chunk + floats, states)
    if tokens > rows:
        # So is the next chunk. The weight's gradient is summed in float32.
        summed = _FLOAT32 * head
        return LossMemory(
            3 * states + summed + max(chunk + next_chunk + floats, chunk + size * head), states + size * head
        )
    if on_cpu and model.optimization_dtype == "float32":
        return LossMemory(3 * states + chunk + floats, 2 * states)
    return LossMemory(3 * states + chunk + max(floats, size * head), states + size * head)


def rl_loss(
    shape: ModelShape, model: ModelConfig, tokens: int, size: int, on_cpu: bool, trains_head: bool
) -> LossMemory:
    """Log-probabilities with `fused_logprobs`, or with the model's own head."""
    chunk = model.fused_lm_head_chunk_size
    if chunk == "disabled" or not _has_plain_head(shape, model):
        return _plain_head(shape.vocab, shape.hidden, tokens, size)
    width = min(shape.vocab, DEFAULT_VOCAB_CHUNK if chunk == "auto" else chunk)
    next_width = min(width, shape.vocab - width)
    rounded = size if size < _FLOAT32 else 0
    # Both passes keep tensors of the last slice until those of the next one replace them.
    forward = _FLOAT32 * tokens * max(3 * width, 2 * width + 2 * next_width)
    one, following = 3 * _FLOAT32 + rounded, (_FLOAT32 + rounded) * width + 2 * _FLOAT32 * next_width
    of_weight = size * shape.vocab * shape.hidden if trains_head else 0
    backward = of_weight + _FLOAT32 * tokens * shape.hidden + tokens * max(one * width, following)
    states = tokens * shape.hidden * size
    return LossMemory(states + max(forward, backward), states + of_weight)


def _plain_head(vocab: int, hidden: int, tokens: int, size: int) -> LossMemory:
    chunk = min(tokens, max(1, _LOGITS // vocab)) * vocab
    states = tokens * hidden * size
    return LossMemory(2 * states + chunk * _PLAIN_FLOATS * _FLOAT32, states + size * vocab * hidden)


def _has_plain_head(shape: ModelShape, model: ModelConfig) -> bool:
    """Whether logits are hidden states times the head's weight, without bias, scale, cap or adapter."""
    if model.lora is not None and is_target(model.lora, "lm_head"):
        return False
    changes = ("final_logit_softcapping", "logit_scale", "logits_scaling")
    has_bias = any(name.endswith("lm_head.bias") for name in shape.root)
    return not has_bias and not any(shape.config.get(key) not in (None, 1, 1.0) for key in changes)
