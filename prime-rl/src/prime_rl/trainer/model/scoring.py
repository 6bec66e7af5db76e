"""Scores packed rows: runs the model's forward pass, then a function of the final hidden states.

A loss needs the logits of only a few tokens at a time, and all logits of a row would be the largest tensor of a step.
`score_tokens` therefore passes hidden states and a function that computes logits to the loss, inside FSDP's forward,
where the head's weights are gathered.
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

from prime_rl.trainer.kernels.attention import SDPA, varlen_arguments
from prime_rl.trainer.kernels.attention_apart import find_sequence_layout
from prime_rl.trainer.kernels.linear_cross_entropy import LIMITS, Limits, linear_cross_entropy_sum
from prime_rl.trainer.model.blocks import decoder_blocks
from prime_rl.trainer.model.packed_rows import Grid, fold
from prime_rl.trainer.model.shared_prefixes import SHARED, PrefixTree, find_shared_prefixes
from prime_rl.trainer.process.errors import ModelError

Result = TypeVar("Result")
LogitsOf = Callable[[Tensor], Tensor]
"""Maps hidden states [N, H] to logits [N, V], in the compute dtype."""

_PROBES = ((0, 1, 2, 3, 4), (5, 6, 7), (0, 1, 5))
"""Token sequences used to check every model. The last one shares a prefix with the first."""


class _Scoring(Protocol):
    """Attributes that `enable_scoring` adds to a model."""

    score_tokens: Callable[[Tensor, Tensor, Callable[[Tensor, LogitsOf], Any]], Any]
    attends_per_sequence: bool


def score_tokens(
    model: nn.Module, input_ids_1T: Tensor, position_ids_1T: Tensor, score: Callable[[Tensor, LogitsOf], Result]
) -> Result:
    """Run one packed row of T tokens and return `score(hidden_TH, logits_of)`.

    `hidden_TH` holds the final hidden states; entry t predicts token t + 1. A sequence starts at each position that is
    not the previous one plus 1, and attention never crosses sequences. `score` returns a tensor or a tuple of tensors;
    it must not keep a reference to `logits_of`.
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
    chunks = zip(hidden_NH.split(chunk), targets_N.split(chunk), strict=True)
    return torch.stack([checkpoint(loss_of, h, t, use_reentrant=False) for h, t in chunks]).sum()


def enable_scoring(model: PreTrainedModel, device: torch.device, *, is_compiled: bool = False) -> None:
    """Enable `score_tokens` on the sharded `model`, and check it against the model's own logits. Collective.

    Raises:
        ModelError: `score_tokens` gives other logits than the model itself, so losses would be wrong.
    """
    scoring = cast("_Scoring", model)
    scoring.score_tokens = MethodType(_score_tokens, model)
    # With compilation, every combination of sequence lengths would need its own graph.
    scoring.attends_per_sequence = device.type == "cpu" and not is_compiled
    register_fsdp_forward_method(model, "score_tokens")
    with _probing(model, device), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        long, other, alike = (Probe(*of_one) for of_one in zip(_PROBES, _reference_logits(model, device), strict=True))
        is_correct, is_isolated = _match_reference(model, device, (long, other))
        if not is_correct:
            raise ModelError(f"{type(model).__name__} modifies its logits after the head, which is not supported")
        if not is_isolated:
            raise ModelError(
                f"{type(model).__name__} lets sequences of a packed row influence each other, which is not supported"
            )
        if model.config._attn_implementation == SDPA and model._supports_attention_backend:
            model.config._attn_implementation = SHARED
            # An optimization: turned off for models that mix tokens by other means than attention.
            if not all(_match_reference(model, device, (long, alike))):
                model.config._attn_implementation = SDPA


def _score_tokens(
    self: PreTrainedModel, input_ids_1T: Tensor, position_ids_1T: Tensor, score: Callable[[Tensor, LogitsOf], Result]
) -> Result:
    kernel, hidden_size = self.config._attn_implementation, self.config.hidden_size
    if kernel in (SDPA, SHARED):
        grid = fold(position_ids_1T, hidden_size)
        tree = find_shared_prefixes(input_ids_1T, position_ids_1T) if kernel == SHARED else None
        may_split = kernel == SHARED and cast("_Scoring", self).attends_per_sequence
        apart = find_sequence_layout(position_ids_1T, self.config) if may_split else None
        layouts = [layout for layout in (grid, tree, apart) if layout is not None]
        layout = min(layouts, key=lambda layout: layout.cost(hidden_size))
        if isinstance(layout, PrefixTree):
            nodes, positions = (row[:, layout.token_of_node_N] for row in (input_ids_1T, position_ids_1T))
            hidden = self.base_model(
                input_ids=nodes, position_ids=positions, use_cache=False, **layout.options()
            ).last_hidden_state
            return score(hidden[0].index_select(0, layout.node_of_token_T), _logits_of(self))
        if isinstance(layout, Grid):
            rows = self.base_model(
                input_ids=layout.scatter(input_ids_1T), position_ids=layout.position_ids_RW, use_cache=False
            ).last_hidden_state
            return score(layout.gather(rows), _logits_of(self))
        options = layout.options()
    else:
        options = varlen_arguments(kernel, position_ids_1T)
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


class Probe(NamedTuple):
    """A token sequence and the model's own logits for it."""

    tokens: Sequence[int]
    logits_TV: Tensor


def _reference_logits(model: PreTrainedModel, device: torch.device) -> list[Tensor]:
    """The model's own logits for each of `_PROBES`. Collective."""
    # One forward pass for all: causal attention hides the padding of the shorter sequences.
    sequences = [torch.tensor(tokens, device=device) for tokens in _PROBES]
    logits_NTV = model(input_ids=pad_sequence(sequences, batch_first=True), use_cache=False).logits.float()
    return [logits_TV[: len(tokens)] for logits_TV, tokens in zip(logits_NTV, _PROBES, strict=True)]


def _match_reference(model: nn.Module, device: torch.device, probes: Sequence[Probe]) -> list[bool]:
    """For each probe, whether `score_tokens` on one packed row of all probes gives its own logits. Collective."""
    tokens = [token for probe in probes for token in probe.tokens]
    positions = [position for probe in probes for position in range(len(probe.tokens))]
    tokens_1T, positions_1T = (torch.tensor(values, device=device)[None] for values in (tokens, positions))
    scored = score_tokens(model, tokens_1T, positions_1T, lambda hidden, logits_of: logits_of(hidden)).float()
    logits_of_probes = scored.split([len(probe.tokens) for probe in probes])
    return [_is_close(logits, probe.logits_TV) for logits, probe in zip(logits_of_probes, probes, strict=True)]


def _is_close(ours: Tensor, own: Tensor) -> bool:
    return torch.allclose(own, ours, rtol=1e-2, atol=1e-2 * float(own.abs().max()))


@contextmanager
def _probing(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """Run the model in evaluation mode in the block, and reshard its weights afterwards.

    A single process on a CPU holds all weights anyway, so it keeps them gathered between forward passes.
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
        # Without a backward pass, parameters stay gathered, and an optimizer created now would reference those.
        for unit in units:
            unit.reshard()
