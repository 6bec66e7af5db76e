"""Scores packed rows: runs the model's forward pass, then a function of the final hidden states.

A loss needs the logits of only a few tokens at a time, and all logits of a row would be the largest tensor of a step.
`score_tokens` therefore passes hidden states and a function that computes logits to the loss, inside FSDP's forward,
where the head's weights are gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from prime_rl.configs.data import TokenLoss
from prime_rl.trainer.kernels.attention import EAGER, SDPA, varlen_arguments
from prime_rl.trainer.kernels.heads import (
    CHUNK_SIZES,
    ChunkSizes,
    fused_logprobs,
    linear_cross_entropy_sum,
    token_weights,
)
from prime_rl.trainer.kernels.products import head_product
from prime_rl.trainer.model.context import own_slice, own_tokens, padded_length, total, with_mean_gradient
from prime_rl.trainer.model.hybrids import SequenceBatches, StateLayers, batch_sequences
from prime_rl.trainer.model.images import RowImages
from prime_rl.trainer.model.layouts import (
    SHARED,
    Grid,
    PrefixTree,
    SequenceBlocks,
    find_sequence_blocks,
    find_shared_prefixes,
    fold,
)
from prime_rl.trainer.model.lora import is_adapted
from prime_rl.trainer.model.vision import ArrangedImages, run_vision, vision_of
from prime_rl.trainer.process.mesh import ContextAxis, Mesh
from prime_rl.transport.loading import has_score
from prime_rl.transport.routing import Routers, Routing
from prime_rl.transport.weights import to_device

Result = TypeVar("Result")
LogitsOf = Callable[[Tensor], Tensor]
"""Maps hidden states [N, H] to logits [N, V], in the compute dtype."""
Layout = Grid | PrefixTree | SequenceBlocks
"""An arrangement of a packed row's tokens for attention kernels without support for packing."""


@dataclass(frozen=True, slots=True)
class ArrangedRow:
    """A packed row of T tokens as the attention kernel takes it, on the model's device."""

    inputs: dict[str, Any]
    """Arguments of the model."""
    places_M: Tensor
    """Of the M tokens to score: the index of each one's hidden state among those that this process computes."""
    sequences: SequenceBatches | None = None
    """The row's sequences, for a model with layers that carry a state from token to token."""
    picks_m: Tensor | None = None
    """Which of the tokens to score this process scores; None: all."""
    routing: Routing | None = None
    """What the routers of a mixture of experts do; None: they choose."""
    images: ArrangedImages | None = None
    """For a model that is trained on images."""


class Scoring(Protocol):
    """Attributes that `enable_scoring` adds to a model."""

    score_tokens: Callable[[ArrangedRow, Callable[..., Any], Sequence[Tensor]], Any]
    layouts: Sequence[type[Layout]]
    """The layouts to choose from. A row for which none of them is possible has a `Grid`."""
    shares_rows: bool
    """Whether several sequences may share a row of a `Grid`."""
    state_layers: StateLayers | None
    """The layers that carry a state from token to token; None if the model has none."""
    context: ContextAxis | None
    """The processes that divide the tokens of a row; None if there is only this one."""
    row_axis: ContextAxis | None
    """The processes that share rows, and each score some of the tokens; None if there is only this one."""
    tp: DeviceMesh | None
    """Those of them that compute the same tokens, of which each scores a part; None if there is only this one."""
    sharing_heads: int
    """Number of processes that divide the heads of an attention layer, before those of `context` do."""
    routers: Routers | None
    """The routers of a mixture of experts; None if the model has none."""
    routes_TLk: Tensor | None
    """The experts of the tokens to score (`replaying`); None: the routers choose."""
    images: RowImages | None
    """The images of the row to score (`seeing`); None if it has none."""


def score_tokens(
    model: nn.Module,
    input_ids_1T: Tensor,
    position_ids_1T: Tensor,
    score: Callable[..., Result],
    tokens_M: Tensor | None = None,
    given: Sequence[Tensor] = (),
    *,
    uses_last: bool = True,
) -> Result:
    """Run one packed row of T tokens and return `score(hidden_MH, logits_of, *given)`.

    `hidden_MH` holds the final hidden states at the indices `tokens_M` (None: of all tokens), and each of `given` has
    an entry for every one of them. Entry t predicts token t + 1. A sequence starts at each position that is
    not the previous one plus 1, and attention never crosses sequences. `score` returns a sum over the tokens, a tensor
    with an entry for each, or a tuple of these; it must not keep a reference to `logits_of`. `uses_last`: it uses the
    hidden state of each sequence's last token; otherwise that may be any state, because some layouts do not compute it.

    Processes that share rows each score some of the tokens, and all return the whole result.

    Keep `position_ids_1T` on the host: the sequences are found there, and for positions on a GPU the host would wait.
    """
    if tokens_M is None:
        tokens_M = torch.arange(input_ids_1T.shape[1], device=input_ids_1T.device)
    row = _arranged(cast("PreTrainedModel", model), input_ids_1T, position_ids_1T, tokens_M, uses_last)
    sharing, picks = scoring_of(model).row_axis, row.picks_m
    if sharing is None or picks is None:
        return scoring_of(model).score_tokens(row, score, given)
    parts = scoring_of(model).score_tokens(row, score, [values.index_select(0, picks) for values in given])
    return total(parts, picks, len(tokens_M), sharing)


@contextmanager
def replaying(model: nn.Module, routes_TLk: Tensor | None) -> Iterator[None]:
    """In the block, `score_tokens` routes each of a row's tokens to these experts in each layer, and the routers only
    compute their weights. None lets the routers choose."""
    scoring = scoring_of(model)
    scoring.routes_TLk = routes_TLk
    try:
        yield
    finally:
        scoring.routes_TLk = None


@contextmanager
def seeing(model: nn.Module, images: RowImages | None) -> Iterator[None]:
    """In the block, `score_tokens` scores a row with these images."""
    scoring = scoring_of(model)
    scoring.images = images
    try:
        yield
    finally:
        scoring.images = None


def cross_entropy_sum(
    hidden_NH: Tensor,
    targets_N: Tensor,
    logits_of: LogitsOf,
    vocab_size: int,
    limits: ChunkSizes = CHUNK_SIZES,
    kind: TokenLoss = "cross_entropy",
) -> Tensor:
    """Sum over N tokens of the cross-entropy in float32, with at most `limits.logits` logits in memory."""
    if isinstance(logits_of, nn.Linear) and is_plain(logits_of):
        product = head_product(logits_of)
        return linear_cross_entropy_sum(hidden_NH, logits_of.weight, targets_N, limits, product, kind)
    chunk = max(1, limits.logits // vocab_size)

    def loss_of(hidden: Tensor, targets: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(logits_of(hidden).float(), targets, reduction="none")
        weights = token_weights(losses, kind)
        return (losses if weights is None else losses * weights).sum()

    if len(targets_N) <= chunk:
        return loss_of(hidden_NH, targets_N)
    chunks = zip(hidden_NH.split(chunk), targets_N.split(chunk), strict=True)
    return torch.stack([checkpoint(loss_of, h, t, use_reentrant=False) for h, t in chunks]).sum()


def is_plain(head: nn.Linear) -> bool:
    """Whether its output is its input times its weight, as fused heads compute it."""
    return type(head) is nn.Linear and head.bias is None and not is_adapted(head)


def enable_scoring(
    model: PreTrainedModel,
    state_layers: StateLayers | None = None,
    mesh: Mesh | None = None,
    sharing_heads: int = 1,
    routers: Routers | None = None,
) -> None:
    """Enable `score_tokens` on the sharded `model`, whose rows the processes of `mesh` may share.

    Call `check_scoring` before relying on it.
    """
    scoring = scoring_of(model)
    scoring.score_tokens = MethodType(_score_tokens, model)
    scoring.layouts, scoring.shares_rows = (Grid,), True
    scoring.state_layers = state_layers or getattr(model, "state_layers", None)
    scoring.context = None if mesh is None else mesh.context_axis
    scoring.row_axis = None if mesh is None else mesh.row_axis
    scoring.tp = None if mesh is None or mesh.tensor_axis is None else mesh.tensor_axis.sharing
    scoring.sharing_heads = sharing_heads
    scoring.routers = getattr(model, "routers", None) if routers is None else routers
    scoring.routes_TLk = None
    scoring.images = None
    if model.config._attn_implementation == SHARED:
        model.config._attn_implementation = SDPA
    register_fsdp_forward_method(model, "score_tokens")


def scoring_of(model: nn.Module) -> Scoring:
    return cast("Scoring", model)


def _score_tokens(
    self: PreTrainedModel, row: ArrangedRow, score: Callable[..., Result], given: Sequence[Tensor]
) -> Result:
    layers, routers = scoring_of(self).state_layers, scoring_of(self).routers
    auxiliary = None if row.routing is None or not routers else routers.auxiliary_loss()
    if row.routing is not None:
        row.routing.auxiliary = auxiliary
    with (
        nullcontext() if layers is None else layers.on(row.sequences),
        nullcontext() if routers is None else routers.on(row.routing),
    ):
        if row.images is not None:
            hidden = run_vision(self, row.inputs, row.images)
        else:
            hidden = self.base_model(use_cache=False, **row.inputs).last_hidden_state
    if auxiliary is not None and routers:
        context = scoring_of(self).context
        loss = auxiliary.finish(None if context is None else context.group, 1 if context is None else context.size)
        if loss is not None:
            routers.load.lost(loss)
    if (tp := scoring_of(self).tp) is not None:
        hidden = with_mean_gradient(hidden, tp.get_group())
    return score(hidden.flatten(0, 1).index_select(0, row.places_M), _logits_of(self), *given)


def _arranged(
    model: PreTrainedModel, input_ids_1T: Tensor, position_ids_1T: Tensor, tokens_M: Tensor, uses_last: bool
) -> ArrangedRow:
    kernel, device, positions = model.config._attn_implementation, input_ids_1T.device, position_ids_1T.cpu()
    context, tp, routes_TLk = scoring_of(model).context, scoring_of(model).tp, scoring_of(model).routes_TLk
    routers = scoring_of(model).routers or None
    images = scoring_of(model).images

    def arranged_images(arrange: Callable[[Tensor], Tensor]) -> ArrangedImages | None:
        """`arrange` makes [R, W] of values of the tokens [1, T]."""
        if vision_of(model) is None or images is None:
            return None if vision_of(model) is None else ArrangedImages(None, None, None)
        feature_of_cell = arrange(to_device(torch.from_numpy(images.feature_of_token_T), device)[None])
        rope = images.rope_positions_3T
        parts = () if rope is None else to_device(torch.from_numpy(rope), device)[:, None]
        return ArrangedImages(
            images, feature_of_cell, torch.stack([arrange(each) for each in parts]) if len(parts) else None
        )

    def row_of(
        inputs: dict[str, Any],
        nodes: int,
        node_of_token_T: Tensor | None,
        routes_NLk: Tensor | None,
        arrange: Callable[[Tensor], Tensor],
    ) -> ArrangedRow:
        sequences = None
        if scoring_of(model).state_layers:
            sequences = batch_sequences(positions, nodes, node_of_token_T, device, uses_last=uses_last)
        places_M = tokens_M if node_of_token_T is None else node_of_token_T.index_select(0, tokens_M)
        weights_N = None if routers is None else _counted(positions, tokens_M, nodes, node_of_token_T)
        if context is None and tp is None:
            routing = None if weights_N is None else Routing(routes_NLk, weights_N)
            return ArrangedRow(inputs, places_M, sequences, routing=routing, images=arranged_images(arrange))
        picks_m, places_m = torch.arange(len(places_M), device=device), places_M
        if context is not None:
            parts = {name: own_slice(inputs[name], context, 1) for name in ("input_ids", "position_ids")}
            inputs = {**inputs, **parts, "context": context}
            picks_m, places_m = own_tokens(places_M, nodes, context)
            routes_NLk = None if routes_NLk is None else own_slice(routes_NLk, context, 0)
            weights_N = None if weights_N is None else own_slice(weights_N, context, 0)
        if tp is not None:
            picks_m, places_m = (each.tensor_split(tp.size())[tp.get_local_rank()] for each in (picks_m, places_m))
        routing = None if weights_N is None else Routing(routes_NLk, weights_N)
        return ArrangedRow(inputs, places_m, sequences, picks_m, routing)

    if kernel not in (SDPA, SHARED, EAGER):
        if (padding := padded_length(positions.numel(), context) - positions.numel()) > 0:
            # A sequence that nothing is scored of.
            positions = torch.cat((positions, torch.arange(padding)[None]), dim=1)
            input_ids_1T = nn.functional.pad(input_ids_1T, (0, padding))
            routes_TLk = None if routes_TLk is None else torch.cat((routes_TLk, routes_TLk[:1].expand(padding, -1, -1)))
        inputs = {"input_ids": input_ids_1T, "position_ids": to_device(positions, device)}
        inputs |= varlen_arguments(kernel, positions, device)
        return row_of(inputs, positions.numel(), None, routes_TLk, lambda values_1T: values_1T)
    # Tokens that were routed to other experts have other hidden states, and share no node.
    told_apart_1T = input_ids_1T if routes_TLk is None else input_ids_1T + _hashed(routes_TLk)
    if images is not None:
        # Tokens of an image are alike if they stand for the same feature.
        numbers_T = to_device(torch.from_numpy(images.feature_of_token_T), device)
        told_apart_1T = torch.where(numbers_T > 0, -numbers_T, told_apart_1T)
    layout = _cheapest_layout(model, told_apart_1T, positions, uses_last)
    if isinstance(layout, Grid):
        inputs = {"input_ids": layout.scatter(input_ids_1T), "position_ids": layout.position_ids_RW}
        cells = layout.position_ids_RW.numel()
        if routes_TLk is not None:
            # Padding takes the experts of the first token: whatever it computes is not used.
            routes_TLk = routes_TLk[:1].repeat(cells, 1, 1).index_copy(0, layout.cells_T, routes_TLk)
        return row_of(inputs, cells, layout.cells_T, routes_TLk, layout.scatter)
    of_nodes = layout.token_of_node_N
    ids, places = (row[:, of_nodes] for row in (input_ids_1T, to_device(positions, device)))
    inputs = {"input_ids": ids, "position_ids": places, **layout.options()}
    routes_NLk = None if routes_TLk is None else routes_TLk[of_nodes]
    return row_of(inputs, ids.numel(), layout.node_of_token_T, routes_NLk, lambda values_1T: values_1T[:, of_nodes])


def _counted(positions_1T: Tensor, tokens_M: Tensor, nodes: int, node_of_token_T: Tensor | None) -> Tensor:
    """How many tokens each of the nodes stands for, without those of sequences in which nothing is scored: padding, and
    rows that only keep processes in step. float32 [N]"""
    starts_T = to_device(positions_1T[0] == 0, tokens_M.device)
    sequence_of_T = starts_T.cumsum(0)
    is_scored = torch.zeros(len(starts_T) + 1, device=tokens_M.device).index_fill(0, sequence_of_T[tokens_M], 1.0)
    weights_T = is_scored[sequence_of_T]
    if node_of_token_T is None:
        return weights_T
    return weights_T.new_zeros(nodes).index_add(0, node_of_token_T, weights_T)


def _hashed(routes_TLk: Tensor) -> Tensor:
    """A number for each token, which almost surely differs between tokens with different experts: int64 [T]."""
    flat = routes_TLk.flatten(1).long()
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (flat.shape[1],), generator=generator)
    return (flat * factors.to(flat.device)).sum(1)  # of 64 bits, modulo which it is computed


def _cheapest_layout(model: PreTrainedModel, input_ids_1T: Tensor, position_ids_1T: Tensor, uses_last: bool) -> Layout:
    hidden_size, scoring = model.config.get_text_config().hidden_size, scoring_of(model)
    divisor = 1 if scoring.context is None else scoring.context.size
    vision = vision_of(model)
    if scoring.images is not None and vision is not None and vision.family.sees_whole_images:
        return fold(position_ids_1T, hidden_size, input_ids_1T.device, shares_rows=scoring.shares_rows)
    if SequenceBlocks in scoring.layouts:
        heads = model.config.get_text_config().num_attention_heads // (divisor * scoring.sharing_heads)
        return find_sequence_blocks(
            input_ids_1T, position_ids_1T, heads, without_last=not uses_last, multiple_of=divisor
        )
    layouts: list[Grid | PrefixTree] = []
    if PrefixTree in scoring.layouts:
        tree = find_shared_prefixes(input_ids_1T, position_ids_1T, without_last=not uses_last, multiple_of=divisor)
        layouts += [tree] if tree is not None else []
    if Grid in scoring.layouts or not layouts:
        layouts.append(fold(position_ids_1T, hidden_size, input_ids_1T.device, shares_rows=scoring.shares_rows))
    return min(layouts, key=lambda layout: layout.cost(hidden_size))


def output_head(model: PreTrainedModel) -> nn.Module:
    """The layer behind the final hidden states."""
    return cast("nn.Module", model.score if has_score(model) else model.get_output_embeddings())


def _logits_of(model: PreTrainedModel) -> LogitsOf:
    head, scale = output_head(model), logit_scale(model)
    if has_score(model):  # scales and caps of a config are those of a vocabulary
        return head
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is None:
        return head if scale == 1 else lambda hidden: head(hidden) * scale
    return lambda hidden: torch.tanh(head(hidden) * (scale / cap)) * cap


def logit_scale(model: PreTrainedModel) -> float:
    """Factor of the head's output, as Cohere (`logit_scale`) and Granite (`logits_scaling`) configure it."""
    config = model.config
    return (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)


# Log-probabilities of chosen tokens, for RL and preferences.


AUTO_VOCAB_CHUNK = 8192
MAX_LOGITS = 2**25
"""Maximum number of logits in memory with an unfused head: 128 MiB in float32."""


def target_logprobs(model: PreTrainedModel, hidden_NH: Tensor, targets_N: Tensor, logits_of: LogitsOf) -> Tensor:
    """Log-probabilities of the targets, float32 [N]. Call it inside of `score_tokens`."""
    temperatures = torch.ones(len(targets_N), device=hidden_NH.device)
    return logprobs_and_entropies(model, hidden_NH, targets_N, temperatures, logits_of, AUTO_VOCAB_CHUNK)[0]


def logprobs_and_entropies(
    model: PreTrainedModel,
    hidden: Tensor,
    labels: Tensor,
    temperatures: Tensor,
    logits_of: LogitsOf,
    vocab_chunk: int | None,
    trains_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `labels` and entropies, float32 [N] each. Without `vocab_chunk` the head is not fused.

    Entropies have a gradient only with `trains_entropy`.
    """
    head = model.get_output_embeddings()
    if vocab_chunk is not None and has_plain_logits(head, model):
        logprobs, entropies = fused_logprobs(hidden, head.weight, labels, temperatures, vocab_chunk, head_product(head))
        return logprobs, entropies if trains_entropy else entropies.detach()
    chunk = functools.partial(_chunk_logprobs, logits_of, trains_entropy)
    logprobs, entropies = _in_chunks(chunk, (hidden, labels, temperatures), model.config.get_text_config().vocab_size)
    return logprobs, entropies


def logprobs_beside_sampler(
    model: PreTrainedModel,
    inputs: tuple[Tensor, Tensor, Tensor],
    ids_NK: Tensor,
    is_support_N: Tensor,
    logits_of: LogitsOf,
    trains_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `logprobs_and_entropies` returns for `inputs` (hidden states, labels, temperatures), and log-probabilities
    [N, K] of the sampler's tokens `ids_NK` without gradient; -1 is no token and has minus infinity.

    With `is_support_N` the distribution of a token is that over its `ids_NK` alone, from which it was sampled. So the
    ratio of both policies is that of two distributions on the same tokens, whose mean under the sampler is 1.
    """
    chunk = functools.partial(_chunk_beside_sampler, logits_of, trains_entropy)
    vocab_size = model.config.get_text_config().vocab_size
    logprobs, entropies, of_sampler = _in_chunks(chunk, (*inputs, ids_NK, is_support_N), vocab_size)
    return logprobs, entropies, of_sampler


def has_plain_logits(head: nn.Module, model: PreTrainedModel) -> bool:
    """Whether logits are just hidden states times the head's weight, as the fused head computes them."""
    is_changed = getattr(model.config, "final_logit_softcapping", None) is not None or logit_scale(model) != 1
    return isinstance(head, nn.Linear) and is_plain(head) and not is_changed


def _in_chunks(
    function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], vocab_size: int
) -> tuple[Tensor, ...]:
    """The function's results for N tokens, from the model's own logits of some tokens at a time.

    Used for heads with a bias, a scale, a soft cap or an adapter, and beside a sampler.
    """
    chunk = max(1, MAX_LOGITS // vocab_size)
    if len(inputs[0]) <= chunk:
        return function(*inputs)
    chunks = zip(*(values.split(chunk) for values in inputs), strict=True)
    scored = (checkpoint(function, *each, use_reentrant=False) for each in chunks)
    return tuple(torch.cat(parts) for parts in zip(*scored, strict=True))


def _chunk_logprobs(
    logits_of: LogitsOf, trains_entropy: bool, hidden: Tensor, labels: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    log_softmax = torch.log_softmax(logits_of(hidden).float() / temperatures[:, None], dim=-1)
    with nullcontext() if trains_entropy else torch.no_grad():
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return -nn.functional.nll_loss(log_softmax, labels, reduction="none"), entropy


def _chunk_beside_sampler(
    logits_of: LogitsOf,
    trains_entropy: bool,
    hidden: Tensor,
    labels: Tensor,
    temperatures: Tensor,
    ids_NK: Tensor,
    is_support_N: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits_of(hidden).float() / temperatures[:, None]
    of_sampler = logits.gather(1, ids_NK.clamp(min=0)).masked_fill(ids_NK < 0, -torch.inf)
    # Without a support there may be no token at all, whose sum has the gradient NaN.
    of_support = of_sampler.masked_fill(~is_support_N[:, None], 0.0)
    log_norm = torch.where(is_support_N, of_support.logsumexp(-1), logits.logsumexp(-1))[:, None]
    with nullcontext() if trains_entropy else torch.no_grad():
        entropy = torch.where(is_support_N, _entropy(of_support - log_norm), _entropy(logits - log_norm))
    logprobs = logits.gather(1, labels[:, None])[:, 0] - log_norm[:, 0]
    return logprobs, entropy, (of_sampler - log_norm).detach()


def _entropy(logprobs_NK: Tensor) -> Tensor:
    """A probability of 0 has minus infinity, and adds nothing."""
    return -(logprobs_NK.exp() * logprobs_NK.clamp(min=_LEAST_LOGPROB)).sum(-1)


_LEAST_LOGPROB = -1e4
