"""Checks at the start of a run that a model's packed rows have the results of plain Transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from prime_rl.trainer.kernels.attention import EAGER, SDPA
from prime_rl.trainer.model.blocks import decoder_blocks
from prime_rl.trainer.model.layouts import SHARED, Grid
from prime_rl.trainer.model.scoring import Layout, score_tokens, scoring_of
from prime_rl.trainer.process.errors import ModelError
from prime_rl.utils.model_lengths import tightened

_PROBES = (range(12), range(20, 27), (*range(6), 30, 31))
"""Sequences that every model is checked with, as indices of `_token`. They are longer than a `tightened` window. The
first and the last share a prefix."""

_EXACT, _ROUNDED = 1e-4, 0.25
"""Largest norm of a difference between logits, relative to their norm: in float32 on a CPU, and in bfloat16 or TF32.
With SmolLM2-135M, two attention kernels differ by 1e-6 in float32 and by 0.02 in bfloat16, where rounding can also send
a token to another expert. Ignoring a window makes a difference of 0.7."""


def _token(index: int, vocab_size: int) -> int:
    """A token id, spread over the vocabulary: after special tokens, which come first, bfloat16 is far less exact."""
    return (4321 + 7919 * index) % vocab_size


class Probe(NamedTuple):
    """A token sequence and the model's own logits for it."""

    tokens: Sequence[int]
    logits_TV: Tensor


def check_scoring(model: PreTrainedModel, device: torch.device, seq_len: int, optional: Sequence[type[Layout]]) -> None:
    """Check `score_tokens` against the model's own logits, computed with eager attention. Collective.

    Each of the `optional` layouts is used from then on if it gives the same logits. The model must be without dropout,
    which means in evaluation mode if it has any.

    Raises:
        ModelError: `score_tokens` gives other logits than the model, so losses would be wrong.
    """
    name, kernel = type(model).__name__.removeprefix("FSDP"), model.config._attn_implementation
    advice = ", which is not supported" if kernel in (SDPA, EAGER) else ": set model.attn = 'sdpa'"
    if model.base_model is model:
        raise ModelError(f"{name} does not separate its layers from its head, which is not supported")
    # Compiled blocks run as written: the check's few shapes are not worth a compilation each.
    with _resharding(model, device), torch.no_grad(), torch.compiler.set_stance("force_eager"), tightened(model):
        expected = _model_logits(model, device, EAGER if model._supports_attention_backend else kernel)
        long, other, alike = (Probe(*of_one) for of_one in zip(_probes(model), expected, strict=True))
        far = _last_position(model, seq_len)
        # Almost every model passes here. Otherwise, the steps in between show what differs.
        if not all(_match(model, device, [other, long], far)):
            own = _model_logits(model, device, kernel)
            if not all(_is_close(logits, wanted) for logits, wanted in zip(own, expected, strict=True)):
                raise ModelError(f"{name} has other logits with {kernel} than with eager attention{advice}")
            if not all(_match(model, device, [long])):
                raise ModelError(f"{name} modifies its logits after the head, which is not supported")
            # What remains is that sequences of a row are not isolated. Each may need a row of the grid for itself.
            scoring_of(model).shares_rows = False
            if kernel not in (SDPA, EAGER) or not all(_match(model, device, [other, long], far)):
                raise ModelError(f"{name} lets sequences of a packed row influence each other{advice}")
        if kernel == SDPA and model._supports_attention_backend and scoring_of(model).shares_rows:
            _choose_layouts(model, device, [long, alike], optional)


def _choose_layouts(
    model: PreTrainedModel, device: torch.device, probes: Sequence[Probe], optional: Sequence[type[Layout]]
) -> None:
    """Enable those of the `optional` layouts that give the model's own logits. They only save time."""
    scoring = scoring_of(model)
    model.config._attn_implementation = SHARED
    equal: list[type[Layout]] = []
    for layout in optional:
        scoring.layouts = (layout,)
        with suppress(ModelError):  # the layout does not support the model's attention
            equal += [layout] if all(_match(model, device, probes)) else []
    scoring.layouts = (Grid, *equal)
    if not equal:
        model.config._attn_implementation = SDPA


def _probes(model: PreTrainedModel) -> list[list[int]]:
    return [[_token(index, model.config.vocab_size) for index in indices] for indices in _PROBES]


def _model_logits(model: PreTrainedModel, device: torch.device, kernel: str) -> list[Tensor]:
    """The model's own logits for each probe, with the attention `kernel`. Collective."""
    # One forward pass for all: causal attention hides the padding of the shorter sequences.
    sequences = [torch.tensor(tokens, device=device) for tokens in _probes(model)]
    before = model.config._attn_implementation
    model.config._attn_implementation = kernel
    try:
        logits_NTV = model(input_ids=pad_sequence(sequences, batch_first=True), use_cache=False).logits
    finally:
        model.config._attn_implementation = before
    return [logits_TV[: len(tokens)] for logits_TV, tokens in zip(logits_NTV, sequences, strict=True)]


def _match(
    model: nn.Module, device: torch.device, probes: Sequence[Probe], far_position: int | None = None
) -> list[bool]:
    """For each probe, whether `score_tokens` on one packed row of all probes gives its own logits. Collective.

    With `far_position`, the row ends with one token at that position, as of a long neighbour.
    """
    tokens = [token for probe in probes for token in probe.tokens]
    positions = [position for probe in probes for position in range(len(probe.tokens))]
    lengths = [len(probe.tokens) for probe in probes]
    if far_position is not None:
        tokens, positions, lengths = [*tokens, 1], [*positions, far_position], [*lengths, 1]
    tokens_1T, positions_1T = (torch.tensor(values, device=device)[None] for values in (tokens, positions))
    scored = score_tokens(model, tokens_1T, positions_1T, lambda hidden, logits_of: logits_of(hidden))
    of_probes = scored.split(lengths)[: len(probes)]
    return [_is_close(logits, probe.logits_TV) for logits, probe in zip(of_probes, probes, strict=True)]


def _last_position(model: PreTrainedModel, seq_len: int) -> int:
    """The largest position of the run. Learned position embeddings end at the model's context length."""
    longest = getattr(model.config, "max_position_embeddings", None) or seq_len
    return max(1, min(seq_len, longest) - 1)


def _is_close(ours: Tensor, own: Tensor) -> bool:
    tolerance = _EXACT if own.dtype == torch.float32 and own.device.type == "cpu" else _ROUNDED
    return bool((ours.float() - own.float()).norm() <= tolerance * own.float().norm())


@contextmanager
def _resharding(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """Reshard the model's weights after the block.

    A single process on a CPU holds all weights anyway, so it keeps them gathered between forward passes.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    is_kept = dist.get_world_size() == 1 and device.type == "cpu"
    blocks = [block for block in decoder_blocks(model) if isinstance(block, FSDPModule)] if is_kept else []
    for block in blocks:
        block.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for block in blocks:
            block.set_reshard_after_forward(True, recurse=False)
        # Without a backward pass, parameters stay gathered, and an optimizer created now would reference those.
        for unit in units:
            unit.reshard()
