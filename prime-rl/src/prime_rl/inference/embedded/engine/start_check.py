"""Checks at the start of the engine that a model's log-probabilities are those of plain Transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from prime_rl.inference.embedded.errors import UnsupportedModel
from prime_rl.utils.model_lengths import tightened

Forward = Callable[..., tuple[Tensor, list[Iterator[Tensor]]]]
"""`ModelRunner.forward`."""

_LENGTH = 12
"""Length of the probe in tokens, longer than a `tightened` window."""
_CACHED = 4
_DECODED = 3
"""Numbers of tokens at the start and at the end of the probe that are read in steps of their own."""

_EXACT, _ROUNDED = 1e-4, 0.25
"""Largest norm of a difference between logits, relative to their norm: in float32 on a CPU, and in bfloat16 or TF32.
With SmolLM2-135M, two attention kernels differ by 1e-6 in float32 and by 0.02 in bfloat16, where rounding can also send
a token to another expert. Ignoring a window makes a difference of 0.7."""


@torch.inference_mode()
def check_positions(model: PreTrainedModel, max_model_len: int) -> None:
    """Check that a token's logits do not depend on the largest position in its batch.

    Raises:
        UnsupportedModel: they do, so they would change with the other sequences of a batch.
    """
    tokens = torch.tensor([_probe(model, _LENGTH + 1)], device=model.device)
    positions = torch.arange(_LENGTH + 1, device=model.device)[None]
    far = positions.clone()
    far[0, -1] = max(max_model_len - 1, _LENGTH)
    with _eager(model):
        near, own = (
            model(input_ids=tokens, position_ids=places, use_cache=False).logits[0, :_LENGTH]
            for places in (far, positions)
        )
    if not _is_close(near, own):
        raise UnsupportedModel(f"{type(model).__name__} has positions that change with the length of a neighbour")


@torch.inference_mode()
def check_slots(model: PreTrainedModel, forward: Forward) -> None:
    """Check prefill, kept prefixes and decoding against eager attention on the whole probe. Uses slot row 0.

    Raises:
        UnsupportedModel: the engine computes other logits than Transformers.
    """
    probe, end = _probe(model, _LENGTH), _LENGTH - _DECODED
    with tightened(model):
        with _eager(model):
            own = model(input_ids=torch.tensor([probe], device=model.device), use_cache=False).logits[0]
        _, (first,) = forward([], [probe[: _CACHED + 1]], [0], full_prompts=[0])
        last, (middle,) = forward([], [probe[:end]], [0], num_cached=[_CACHED], full_prompts=[0])
        decoded = [forward([probe[: index + 1]], [], [])[0] for index in range(end, _LENGTH)]
    if not _is_close(torch.cat([*first, *middle, last, *decoded]), own):
        raise UnsupportedModel(f"{type(model).__name__} has an attention that the embedded engine does not support")


def _probe(model: PreTrainedModel, length: int) -> list[int]:
    """Token ids, spread over the vocabulary: after special tokens, which come first, bfloat16 is far less exact."""
    vocab_size = model.config.get_text_config().vocab_size
    return [(4321 + 7919 * index) % vocab_size for index in range(length)]


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """Run the model with Transformers' eager attention in the block."""
    before = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _is_close(ours: Tensor, own: Tensor) -> bool:
    tolerance = _EXACT if own.dtype == torch.float32 and own.device.type == "cpu" else _ROUNDED
    return bool((ours.float() - own.float()).norm() <= tolerance * own.float().norm())
