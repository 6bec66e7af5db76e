"""From token rows to per-token results: forward pass, then a function of the final hidden states.

A loss needs the logits of a few tokens at a time, never all of them at once (tokens times vocabulary is the largest
tensor of a step). `score_tokens` therefore hands out hidden states and a function that makes logits, inside FSDP's
forward, where the head's weights are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from prime_rl.trainer.attention import SDPA, row_options
from prime_rl.trainer.attention_apart import find_sequences_apart
from prime_rl.trainer.errors import ModelError
from prime_rl.trainer.linear_cross_entropy import linear_cross_entropy_sum
from prime_rl.trainer.packed_rows import fold
from prime_rl.trainer.shared_prefixes import SHARED, find_shared_prefixes

Result = TypeVar("Result")
LogitsOf = Callable[[Tensor], Tensor]
"""Hidden states [N, H] to logits [N, V], in the compute dtype."""

_CHECKED = ((0, 1, 2, 3, 4), (5, 6, 7))
_CHECKED_SHARED = ((0, 1, 2, 3, 4), (0, 1, 5))
"""Sequences that every model is tried on."""
_MAX_LOGITS = 2**25
"""Logits that may exist at a time: 128 MiB in float32."""


def score_tokens(
    model: nn.Module, input_ids_1T: Tensor, position_ids_1T: Tensor, score: Callable[[Tensor, LogitsOf], Result]
) -> Result:
    """Run one packed row of T tokens and return `score(hidden_TH, logits_of)`.

    `hidden_TH` are the final hidden states; entry t predicts token t + 1. Sequences of the row start where a position
    is not the previous one plus 1, and never see each other. `score` returns a tensor or a tuple of tensors; it must
    not keep `logits_of`.
    """
    return model.score_tokens(input_ids_1T, position_ids_1T, score)


def cross_entropy_sum(hidden_NH: Tensor, targets_N: Tensor, logits_of: LogitsOf, vocab_size: int) -> Tensor:
    """Sum over N tokens of the cross-entropy in float32, with at most `_MAX_LOGITS` logits in memory."""
    if type(logits_of) is nn.Linear and logits_of.bias is None:
        return linear_cross_entropy_sum(hidden_NH, logits_of.weight, targets_N)
    chunk = max(1, _MAX_LOGITS // vocab_size)

    def loss_of(hidden: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits_of(hidden).float(), targets, reduction="sum")

    if len(targets_N) <= chunk:
        return loss_of(hidden_NH, targets_N)
    pieces = zip(hidden_NH.split(chunk), targets_N.split(chunk), strict=True)
    return torch.stack([checkpoint(loss_of, h, t, use_reentrant=False) for h, t in pieces]).sum()


def enable_scoring(model: nn.Module, device: torch.device, *, is_compiled: bool = False) -> None:
    """Let `score_tokens` run the sharded `model`, whose inputs are on `device`; a collective call.

    Raises:
        ModelError: the model does more to its logits than we know of, so a loss on ours would be wrong.
    """
    model.score_tokens = MethodType(_score_tokens, model)
    # A graph would be compiled for every division of a row into sequences.
    model.takes_sequences_apart = device.type == "cpu" and not is_compiled
    register_fsdp_forward_method(model, "score_tokens")
    first, second = _logits_are_right(model, device, _CHECKED)
    if not first:
        raise ModelError(f"{type(model).__name__} changes its logits behind the head: this family is not supported")
    if not second:
        raise ModelError(
            f"{type(model).__name__} lets the sequences of a packed row see each other: this family is not supported"
        )
    if model.config._attn_implementation == SDPA and model._supports_attention_backend:
        model.config._attn_implementation = SHARED
        # A saving, so a model that mixes tokens otherwise than by attention goes without.
        if not all(_logits_are_right(model, device, _CHECKED_SHARED)):
            model.config._attn_implementation = SDPA


def _score_tokens(
    self: nn.Module, input_ids_1T: Tensor, position_ids_1T: Tensor, score: Callable[[Tensor, LogitsOf], Result]
) -> Result:
    kernel, hidden_size = self.config._attn_implementation, self.config.hidden_size
    if kernel in (SDPA, SHARED):
        grid = fold(position_ids_1T, hidden_size)
        tree = find_shared_prefixes(input_ids_1T, position_ids_1T) if kernel == SHARED else None
        may_part = kernel == SHARED and self.takes_sequences_apart
        apart = find_sequences_apart(position_ids_1T, self.config) if may_part else None
        layouts = [layout for layout in (grid, tree, apart) if layout is not None]
        layout = min(layouts, key=lambda layout: layout.cost(hidden_size))
        if layout is tree:
            nodes, places = (row[:, tree.token_of_node_N] for row in (input_ids_1T, position_ids_1T))
            hidden = self.base_model(
                input_ids=nodes, position_ids=places, use_cache=False, **tree.options()
            ).last_hidden_state
            return score(hidden[0].index_select(0, tree.node_of_token_T), _logits_of(self))
        if layout is grid:
            rows = self.base_model(
                input_ids=grid.place(input_ids_1T), position_ids=grid.position_ids_RW, use_cache=False
            ).last_hidden_state
            return score(grid.collect(rows), _logits_of(self))
        options = apart.options()
    else:
        options = row_options(kernel, position_ids_1T)
    row = self.base_model(
        input_ids=input_ids_1T, position_ids=position_ids_1T, use_cache=False, **options
    ).last_hidden_state
    return score(row[0], _logits_of(self))


def _logits_of(model: nn.Module) -> LogitsOf:
    head = model.get_output_embeddings()
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is None:
        return head
    return lambda hidden: torch.tanh(head(hidden) / cap) * cap


@torch.no_grad()
def _logits_are_right(model: nn.Module, device: torch.device, checked: Sequence[Sequence[int]]) -> list[bool]:
    """Compare our logits of a row of sequences with the model's own of each. Collective."""
    sequences = [torch.tensor(tokens, device=device)[None] for tokens in checked]
    places = [torch.arange(len(tokens), device=device)[None] for tokens in checked]
    row, positions = torch.cat(sequences, 1), torch.cat(places, 1)
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        own = [model(input_ids=ids, use_cache=False).logits[0].float() for ids in sequences]
        ours = score_tokens(model, row, positions, lambda hidden, logits_of: logits_of(hidden)).float()
    model.train()
    # Without a backward pass the gathered parameters stay in place, and an optimizer made now would hold those.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return [_is_close(*pair) for pair in zip(ours.split([len(tokens) for tokens in checked]), own, strict=True)]


def _is_close(ours: Tensor, own: Tensor) -> bool:
    return torch.allclose(own, ours, rtol=1e-2, atol=1e-2 * float(own.abs().max()))
