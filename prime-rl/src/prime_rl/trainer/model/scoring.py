"""From token rows to per-token results: forward pass, then a function of the final hidden states.

A loss needs the logits of a few tokens at a time, never all of them at once (tokens times vocabulary is the largest
tensor of a step). `score_tokens` therefore hands out hidden states and a function that makes logits, inside FSDP's
forward, where the head's weights are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from prime_rl.trainer.kernels.attention import SDPA, row_options
from prime_rl.trainer.kernels.attention_apart import find_sequences_apart
from prime_rl.trainer.kernels.linear_cross_entropy import LIMITS, Limits, linear_cross_entropy_sum
from prime_rl.trainer.model.blocks import decoder_blocks
from prime_rl.trainer.model.packed_rows import Grid, fold
from prime_rl.trainer.model.shared_prefixes import SHARED, PrefixTree, find_shared_prefixes
from prime_rl.trainer.process.errors import ModelError

Result = TypeVar("Result")
LogitsOf = Callable[[Tensor], Tensor]
"""Hidden states [N, H] to logits [N, V], in the compute dtype."""

_CHECKED = ((0, 1, 2, 3, 4), (5, 6, 7), (0, 1, 5))
"""Sequences that every model is tried on. The last one begins as the first one does."""


class _Scoring(Protocol):
    """What `enable_scoring` adds to a model."""

    score_tokens: Callable[[Tensor, Tensor, Callable[[Tensor, LogitsOf], Any]], Any]
    takes_sequences_apart: bool


def score_tokens(
    model: nn.Module, input_ids_1T: Tensor, position_ids_1T: Tensor, score: Callable[[Tensor, LogitsOf], Result]
) -> Result:
    """Run one packed row of T tokens and return `score(hidden_TH, logits_of)`.

    `hidden_TH` are the final hidden states; entry t predicts token t + 1. Sequences of the row start where a position
    is not the previous one plus 1, and never see each other. `score` returns a tensor or a tuple of tensors; it must
    not keep `logits_of`.
    """
    return cast("_Scoring", model).score_tokens(input_ids_1T, position_ids_1T, score)


def cross_entropy_sum(
    hidden_NH: Tensor, targets_N: Tensor, logits_of: LogitsOf, vocab_size: int, limits: Limits = LIMITS
) -> Tensor:
    """Sum over N tokens of the cross-entropy in float32, with at most `limits.logits` logits in memory."""
    if type(logits_of) is nn.Linear and logits_of.bias is None:
        return linear_cross_entropy_sum(hidden_NH, logits_of.weight, targets_N, limits)
    chunk = max(1, limits.logits // vocab_size)

    def loss_of(hidden: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits_of(hidden).float(), targets, reduction="sum")

    if len(targets_N) <= chunk:
        return loss_of(hidden_NH, targets_N)
    pieces = zip(hidden_NH.split(chunk), targets_N.split(chunk), strict=True)
    return torch.stack([checkpoint(loss_of, h, t, use_reentrant=False) for h, t in pieces]).sum()


def enable_scoring(model: PreTrainedModel, device: torch.device, *, is_compiled: bool = False) -> None:
    """Let `score_tokens` run the sharded `model`, whose inputs are on `device`; a collective call.

    Raises:
        ModelError: the model does more to its logits than we know of, so a loss on ours would be wrong.
    """
    scoring = cast("_Scoring", model)
    scoring.score_tokens = MethodType(_score_tokens, model)
    # A graph would be compiled for every division of a row into sequences.
    scoring.takes_sequences_apart = device.type == "cpu" and not is_compiled
    register_fsdp_forward_method(model, "score_tokens")
    with _gathered_once(model, device), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        long, other, alike = (Tried(*of_one) for of_one in zip(_CHECKED, _own_logits(model, device), strict=True))
        is_right, is_apart = _are_scored(model, device, (long, other))
        if not is_right:
            raise ModelError(f"{type(model).__name__} changes its logits behind the head: this family is not supported")
        if not is_apart:
            raise ModelError(
                f"{type(model).__name__} lets the sequences of a packed row see each other: this family is not "
                "supported"
            )
        if model.config._attn_implementation == SDPA and model._supports_attention_backend:
            model.config._attn_implementation = SHARED
            # A saving, so a model that mixes tokens otherwise than by attention goes without.
            if not all(_are_scored(model, device, (long, alike))):
                model.config._attn_implementation = SDPA


def _score_tokens(
    self: PreTrainedModel, input_ids_1T: Tensor, position_ids_1T: Tensor, score: Callable[[Tensor, LogitsOf], Result]
) -> Result:
    kernel, hidden_size = self.config._attn_implementation, self.config.hidden_size
    if kernel in (SDPA, SHARED):
        grid = fold(position_ids_1T, hidden_size)
        tree = find_shared_prefixes(input_ids_1T, position_ids_1T) if kernel == SHARED else None
        may_part = kernel == SHARED and cast("_Scoring", self).takes_sequences_apart
        apart = find_sequences_apart(position_ids_1T, self.config) if may_part else None
        layouts = [layout for layout in (grid, tree, apart) if layout is not None]
        layout = min(layouts, key=lambda layout: layout.cost(hidden_size))
        if isinstance(layout, PrefixTree):
            nodes, places = (row[:, layout.token_of_node_N] for row in (input_ids_1T, position_ids_1T))
            hidden = self.base_model(
                input_ids=nodes, position_ids=places, use_cache=False, **layout.options()
            ).last_hidden_state
            return score(hidden[0].index_select(0, layout.node_of_token_T), _logits_of(self))
        if isinstance(layout, Grid):
            rows = self.base_model(
                input_ids=layout.place(input_ids_1T), position_ids=layout.position_ids_RW, use_cache=False
            ).last_hidden_state
            return score(layout.collect(rows), _logits_of(self))
        options = layout.options()
    else:
        options = row_options(kernel, position_ids_1T)
    row = self.base_model(
        input_ids=input_ids_1T, position_ids=position_ids_1T, use_cache=False, **options
    ).last_hidden_state
    return score(row[0], _logits_of(self))


def _logits_of(model: PreTrainedModel) -> LogitsOf:
    head = model.get_output_embeddings()
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is None:
        return head
    return lambda hidden: torch.tanh(head(hidden) / cap) * cap


class Tried(NamedTuple):
    """A sequence, and what the model itself makes of it."""

    tokens: Sequence[int]
    logits_TV: Tensor


def _own_logits(model: PreTrainedModel, device: torch.device) -> list[Tensor]:
    """The model's own logits of each of `_CHECKED`. Collective."""
    # One pass for all: what follows the end of the shorter ones is not seen by the tokens before.
    sequences = [torch.tensor(tokens, device=device) for tokens in _CHECKED]
    logits_NTV = model(input_ids=pad_sequence(sequences, batch_first=True), use_cache=False).logits.float()
    return [logits_TV[: len(tokens)] for logits_TV, tokens in zip(logits_NTV, _CHECKED, strict=True)]


def _are_scored(model: nn.Module, device: torch.device, tried: Sequence[Tried]) -> list[bool]:
    """Of each sequence of a row, whether `score_tokens` hands out its own logits. Collective."""
    row = [token for sequence in tried for token in sequence.tokens]
    places = [place for sequence in tried for place in range(len(sequence.tokens))]
    row_1T, places_1T = (torch.tensor(of_row, device=device)[None] for of_row in (row, places))
    ours = score_tokens(model, row_1T, places_1T, lambda hidden, logits_of: logits_of(hidden)).float()
    of_each = ours.split([len(sequence.tokens) for sequence in tried])
    return [_is_close(mine, sequence.logits_TV) for mine, sequence in zip(of_each, tried, strict=True)]


def _is_close(ours: Tensor, own: Tensor) -> bool:
    return torch.allclose(own, ours, rtol=1e-2, atol=1e-2 * float(own.abs().max()))


@contextmanager
def _gathered_once(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """Try the model in the block, and have its weights sharded again behind it.

    A lone process on a CPU has them all anyway, and keeps them gathered from one pass to the next.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    is_kept = dist.get_world_size() == 1 and device.type == "cpu"
    blocks = [block for block in decoder_blocks(model) if isinstance(block, FSDPModule)] if is_kept else []
    for block in blocks:
        block.set_reshard_after_forward(False, recurse=False)
    model.eval()
    try:
        yield
    finally:
        model.train()
        for block in blocks:
            block.set_reshard_after_forward(True, recurse=False)
        # Without a backward pass gathered parameters stay in place, and an optimizer made now would hold those.
        for unit in units:
            unit.reshard()
