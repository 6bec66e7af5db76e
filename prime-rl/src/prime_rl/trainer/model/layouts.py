"""Arranges a packed row for attention kernels that cannot keep the sequences of a row apart.

A micro-batch is one row of T tokens with several sequences. Flash attention processes it directly. SDPA would build a
T x T mask and compute T * T scores, nearly all of them masked: 30 times slower on a CPU for 64 sequences of 64 tokens.

Grid: the sequences become short rows of a grid, and the results are gathered in the original order.

PrefixTree: the common prefix of several sequences is computed once. RL trains on groups of completions of one prompt,
and a token's hidden states depend only on the tokens before it, so all copies of a prompt have the same ones. Tokens
with the same prefix are one node. The model runs on the nodes, and only attention runs on complete sequences. Results
and gradients equal those of separate sequences, up to rounding.

SequenceBlocks: nodes as in a PrefixTree, which attend in blocks of sequences of similar length (`blocked_attention`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from prime_rl.trainer.model.context import over_context
from prime_rl.trainer.process.errors import ModelError
from prime_rl.transport.weights import to_device

# Attention of a packed row on a CPU, written as batched matrix products over blocks of sequences.
#
# A block has queries of C sequences of similar length, and the keys before their end. Its scores fit into a core's
# cache, and what a causal mask would discard is mostly not computed. Each token attends once, even if several sequences
# share it. The backward pass computes the probabilities again, so only queries, keys and values are kept. In bfloat16,
# PyTorch's flash kernels take twice the time forward and up to six times backward; in float32 they are equally fast.
# Shapes: N nodes (tokens that are computed), W keys and Q queries of each of C sequences, H query heads in G groups of
# R heads, D head dim of queries and keys, E head dim of values.


@dataclass(frozen=True, slots=True)
class Block:
    """Queries of C sequences that are computed at once, and the keys that they may attend to."""

    nodes_CW: Tensor
    """Nodes of the first W tokens of each sequence. Padding on the right is any node: no used query sees it."""
    first: int
    """Column of the first query. The last query may be in the padding."""
    targets_CQ: Tensor
    """Node of each query; N if the query's result is not used, because of padding or because another block has it."""

    @property
    def query_nodes_CQ(self) -> Tensor:
        return self.nodes_CW[:, self.first : self.first + self.targets_CQ.shape[1]]

    def mask(self, like: Tensor, groups: int, window: int | None) -> Tensor:
        """Additive mask [groups * Q, W]: causal, and limited to the last `window` tokens."""
        columns = torch.arange(self.nodes_CW.shape[1])
        rows = torch.arange(self.first, self.first + self.targets_CQ.shape[1])[:, None]
        hidden = columns > rows
        if window is not None:
            hidden |= columns <= rows - window
        return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -torch.inf).repeat(groups, 1)


def attend_blocks(
    q_NHD: Tensor, k_NGD: Tensor, v_NGE: Tensor, blocks: Sequence[Block], scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of every node to the tokens of its sequence up to itself. Returns [N, H, E].

    Nodes that are no block's target get zeros. Grouped-query attention: each of the G key-value heads serves R = H / G
    consecutive query heads.
    """
    return _BlockedAttention.apply(q_NHD, k_NGD, v_NGE, blocks, scale, window)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], scale: float, window: int | None
    ) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        out = q.new_zeros(len(q) + 1, q.shape[1], v.shape[2])
        for block in blocks:
            probabilities = _probabilities(block, q, k, scale, window)
            mixed = torch.bmm(probabilities, _gather(v, block.nodes_CW))
            out.index_copy_(0, block.targets_CQ.flatten(), _ungroup(mixed, block, groups))
        ctx.save_for_backward(q, k, v)
        ctx.blocks, ctx.scale, ctx.window = blocks, scale, window
        return out[:-1]

    @staticmethod
    def backward(ctx: Any, grad_NHE: Tensor) -> tuple[Tensor | None, ...]:
        """Dao et al. 2022 (FlashAttention), appendix B.2, block by block."""
        q, k, v = ctx.saved_tensors
        groups = q.shape[1] // k.shape[1]
        grad = torch.cat((grad_NHE, grad_NHE.new_zeros(1, *grad_NHE.shape[1:])))  # results that are not used: zeros
        grad_q = q.new_zeros(len(q) + 1, *q.shape[1:])
        grad_k, grad_v = (torch.zeros(states.shape, dtype=torch.float32) for states in (k, v))
        for block in ctx.blocks:
            p = _probabilities(block, q, k, ctx.scale, ctx.window)
            of_out = _gather(grad, block.targets_CQ, groups)
            _add(grad_v, block, torch.bmm(p.transpose(1, 2), of_out))
            of_p = torch.bmm(of_out, _gather(v, block.nodes_CW).transpose(1, 2))
            of_scores = torch._softmax_backward_data(of_p, p, -1, p.dtype)
            of_q = torch.bmm(of_scores, _gather(k, block.nodes_CW)).mul_(ctx.scale)
            grad_q.index_copy_(0, block.targets_CQ.flatten(), _ungroup(of_q, block, groups))
            queries = _gather(q, block.query_nodes_CQ, groups)
            _add(grad_k, block, torch.bmm(of_scores.transpose(1, 2), queries).mul_(ctx.scale))
            del p, of_p, of_scores  # before the next block's: in float32 64 MB each
        return grad_q[:-1], grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def _probabilities(block: Block, q: Tensor, k: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention probabilities [C * G, R * Q, W]."""
    groups = q.shape[1] // k.shape[1]
    queries, keys = _gather(q, block.query_nodes_CQ, groups), _gather(k, block.nodes_CW)
    mask = block.mask(q, groups, window)
    return torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale).softmax(-1)


def _gather(states_NHD: Tensor, nodes_CL: Tensor, groups: int = 1) -> Tensor:
    """States of the nodes: [C * H / groups, groups * L, D]."""
    count, length = nodes_CL.shape
    found = states_NHD.index_select(0, nodes_CL.flatten())
    by_head = found.view(count, length, -1, groups, found.shape[-1]).permute(0, 2, 3, 1, 4)
    return by_head.reshape(-1, groups * length, found.shape[-1])


def _ungroup(states: Tensor, block: Block, groups: int) -> Tensor:
    """The inverse of `_gather` for a block's queries: [C * G, R * Q, D] to [C * Q, H, D]."""
    count, length = block.targets_CQ.shape
    by_token = states.view(count, -1, groups, length, states.shape[-1]).permute(0, 3, 1, 2, 4)
    return by_token.reshape(count * length, -1, states.shape[-1])


def _add(total_NGD: Tensor, block: Block, part: Tensor) -> None:
    """Add the gradients [C * G, W, D] of a block's keys or values to those of their nodes."""
    count, width = block.nodes_CW.shape
    by_token = part.view(count, -1, width, part.shape[-1]).transpose(1, 2).to(total_NGD.dtype)
    total_NGD.index_add_(0, block.nodes_CW.flatten(), by_token.reshape(count * width, -1, part.shape[-1]))


@dataclass(frozen=True, slots=True)
class Grid:
    """Position of each of a packed row's T tokens in a grid of R rows of W cells."""

    cells_T: Tensor
    """Flat index of each token's cell, in R * W cells."""
    position_ids_RW: Tensor
    """Position ids. Padding after a row's last sequence continues its positions, so that it starts no new sequence."""

    def scatter(self, row_1T: Tensor) -> Tensor:
        """Arrange the token ids of a packed row as [R, W], padded with 1: the embedding of 0 may be zeros, whose root
        has no gradient in Gemma 3n."""
        grid = row_1T.new_ones(self.position_ids_RW.numel())
        grid[self.cells_T] = row_1T[0]
        return grid.view(self.position_ids_RW.shape)

    def cost(self, hidden_size: int) -> int:
        return layout_cost(self.position_ids_RW.numel(), self.position_ids_RW.shape[1], hidden_size)

    def gather(self, grid_RWH: Tensor) -> Tensor:
        """Collect the results of the T tokens in the packed row's order: [T, H]."""
        return grid_RWH.flatten(0, 1).index_select(0, self.cells_T)


def fold(
    position_ids_1T: Tensor, hidden_size: int, device: torch.device | None = None, *, shares_rows: bool = True
) -> Grid:
    """Choose the cheaper of two layouts: the packed row itself, or a grid as wide as the longest sequence.

    The positions are on the host, and the grid is for `device`, by default the host too.

    As in Transformers' packed mask, a sequence starts at each position that is not the previous one plus 1. With
    `shares_rows=False`, every sequence has a row of the grid to itself, for models that mix the sequences of a row.
    """
    device = device or position_ids_1T.device
    positions = position_ids_1T[0].numpy()
    starts = sequence_starts(positions)
    lengths = np.diff(np.append(starts, len(positions)))
    width = int(lengths.max())
    if shares_rows:
        rows, columns, row_count = _first_fit_decreasing(lengths, width)
    else:
        rows, columns, row_count = np.arange(len(lengths)), np.zeros_like(lengths), len(lengths)
    unfolded_cost = layout_cost(len(positions), len(positions), hidden_size)
    if shares_rows and layout_cost(row_count * width, width, hidden_size) >= unfolded_cost:
        return Grid(torch.arange(len(positions), device=device), to_device(position_ids_1T, device))
    within = np.arange(len(positions)) - np.repeat(starts, lengths)
    cells = np.repeat(rows * width + columns, lengths) + within
    last_start = np.zeros(row_count, dtype=np.int64)
    np.maximum.at(last_start, rows, columns)
    grid = np.arange(width)[None, :] - last_start[:, None]
    grid.flat[cells] = positions
    return Grid(to_device(torch.from_numpy(cells), device), to_device(torch.from_numpy(grid), device))


def layout_cost(cells: int, width: int, hidden_size: int) -> int:
    """Estimated cost of a block in units of 4 H FLOP. A cell takes 24 H^2 FLOP in linear layers, 4 H W in attention."""
    return cells * (6 * hidden_size + width)


def sequence_bounds(position_ids_1T: Tensor, device: torch.device | None = None) -> tuple[Tensor, int]:
    """Start of each of a row's S sequences and the row's end, int32 [S + 1], and the length of the longest sequence.

    The bounds are on `device`, by default that of the positions.
    """
    positions = position_ids_1T[0].cpu().numpy()
    bounds = np.append(sequence_starts(positions), len(positions)).astype(np.int32)
    return to_device(torch.from_numpy(bounds), device or position_ids_1T.device), int(np.diff(bounds).max())


def sequence_starts(positions: np.ndarray) -> np.ndarray:
    """Start indices of the sequences in a row, [S]."""
    return np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) != 1)


def _first_fit_decreasing(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Assign sequences, longest first, to the first row with space. Returns rows, first columns and the row count."""
    free = np.full(len(lengths), width)
    rows = np.empty(len(lengths), dtype=np.int64)
    for index in np.argsort(-lengths, kind="stable"):
        row = int(np.argmax(free >= lengths[index]))
        rows[index] = row
        free[row] -= lengths[index]
    row_count = int(rows.max()) + 1
    columns = np.empty_like(rows)
    used = np.zeros(row_count, dtype=np.int64)
    for index, row in enumerate(rows.tolist()):
        columns[index] = used[row]
        used[row] += lengths[index]
    return rows, columns, row_count


SHARED = "sdpa_shared_prefixes"


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Prefix tree of T tokens in S sequences, with N nodes. Attention runs on S rows as wide as the longest one, W."""

    node_of_token_T: Tensor
    token_of_node_N: Tensor
    """Index of one of the node's tokens."""
    node_of_cell_SW: Tensor
    """Padding on the right repeats the sequence's last node; causal attention hides it from the other cells."""
    cell_of_node_N: Tensor
    """Flat index of a cell that has the node's attention output."""

    def cost(self, hidden_size: int) -> int:
        """Estimated cost, in the units of `layout_cost`: linear layers run on nodes, attention on cells."""
        cells, width = self.node_of_cell_SW.numel(), self.node_of_cell_SW.shape[1]
        return layout_cost(len(self.token_of_node_N), 0, hidden_size) + layout_cost(cells, width, 0)

    def options(self) -> dict[str, Any]:
        """Model arguments for the attention function. The empty mask keeps Transformers from building one."""
        nothing = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=self.node_of_token_T.device)
        return {
            "attention_mask": nothing,
            "node_of_cell": self.node_of_cell_SW,
            "cell_of_node": self.cell_of_node_N,
        }


class Nodes(NamedTuple):
    """The prefix tree of a packed row of T tokens, without an arrangement for attention."""

    node_of_token_T: np.ndarray
    token_of_node_N: np.ndarray
    """Index of one of the node's tokens."""
    spans: list[range]
    """The tokens of each sequence that have a node, sequences with a common prefix next to each other."""
    shared: list[int]
    """Number of each sequence's first tokens whose nodes it shares with the sequence before it."""


def prefix_nodes(input_ids_1T: Tensor, position_ids_1T: Tensor, *, without_last: bool = False) -> Nodes | None:
    """Find the common prefixes of a packed row's sequences. Returns None if no two sequences have one.

    `without_last`: the last token of a sequence, after which nothing is predicted, has no node of its own. It refers to
    that of the token before it.
    """
    ids, positions = input_ids_1T[0].cpu().numpy(), position_ids_1T[0].cpu().numpy()
    starts = sequence_starts(positions)
    bounds = [*starts.tolist(), len(ids)]
    spans = [range(start, max(stop - without_last, start + 1)) for start, stop in pairwise(bounds)]
    # In sorted order, each sequence shares its longest common prefix with the one before it.
    spans.sort(key=lambda span: (positions[span.start], ids[span.start : span.stop].tolist()))
    shared = [_common_prefix_length(ids, positions, *pair) for pair in pairwise([range(0), *spans])]
    if not any(shared):
        return None
    node_of_token = np.empty(len(ids), dtype=np.int64)
    tokens: list[np.ndarray] = []
    count = 0
    before = range(0)
    for span, common in zip(spans, shared, strict=True):
        node_of_token[span.start : span.start + common] = node_of_token[before.start : before.start + common]
        own = np.arange(span.start + common, span.stop)
        node_of_token[own] = np.arange(count, count + len(own))
        tokens.append(own)
        count += len(own)
        before = span
    if without_last:
        last = np.array(bounds[1:]) - 1
        node_of_token[last] = node_of_token[np.maximum(last - 1, starts)]
    return Nodes(node_of_token, np.concatenate(tokens), spans, shared)


def find_shared_prefixes(
    input_ids_1T: Tensor, position_ids_1T: Tensor, *, without_last: bool = False, multiple_of: int = 1
) -> PrefixTree | None:
    """Build the prefix tree of a packed row. Returns None if no two sequences share a prefix.

    `without_last` as in `prefix_nodes`. With `multiple_of`, which a row that is divided among processes needs, there is
    always a tree, and nodes that nothing refers to bring their number to a multiple of it.
    """
    nodes = prefix_nodes(input_ids_1T, position_ids_1T, without_last=without_last)
    if nodes is None and multiple_of == 1:
        return None
    return _tree(_padded(nodes or _separate(position_ids_1T), multiple_of), input_ids_1T.device)


def shared_prefix_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention behind Transformers' interface: [B, heads, T, D] in, [B, T, heads, D] out.

    B = 1 for blocks (`blocks`) and for a prefix tree (`node_of_cell`). Without either, this is SDPA.

    Raises:
        ModelError: the model needs a soft cap, sinks or a bias of the scores.
    """
    if any(options.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise ModelError(f"{type(module).__name__} is not supported by SDPA: soft caps, sinks or biases of scores")
    blocks, window = options.pop("blocks", None), options.get("sliding_window")
    if blocks is not None:
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        return attend_blocks(q, k, v, blocks, options["scaling"], window)[None], None
    node_of_cell, cell_of_node = options.pop("node_of_cell", None), options.pop("cell_of_node", None)
    if node_of_cell is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    queries, keys, values = (_gather_cells(states, node_of_cell) for states in (query, key, value))
    mask = _window_mask(node_of_cell.shape[1], window, query.device)
    # The module's own number of groups is another one where processes repeat heads (`over_context`).
    heads = _Heads(query.shape[1] // key.shape[1], getattr(module, "is_causal", True))
    outcome, _ = sdpa_attention_forward(cast("nn.Module", heads), queries, keys, values, mask, **options)
    return outcome.flatten(0, 1).index_select(0, cell_of_node)[None], None


class _Heads(NamedTuple):
    """What SDPA behind Transformers' interface reads from a module."""

    num_key_value_groups: int
    is_causal: bool


AttentionInterface.register(SHARED, over_context(shared_prefix_attention))
AttentionMaskInterface.register(SHARED, sdpa_mask)


def _common_prefix_length(ids: np.ndarray, positions: np.ndarray, first: range, second: range) -> int:
    """Length of the common prefix of two sequences."""
    length = min(len(first), len(second))
    if length == 0 or positions[first.start] != positions[second.start]:
        return 0
    differs = ids[first.start : first.start + length] != ids[second.start : second.start + length]
    return int(np.argmax(differs)) if differs.any() else length


def _tree(nodes: Nodes, device: torch.device) -> PrefixTree:
    width = max(map(len, nodes.spans))
    starts, lengths = np.array([[span.start, len(span)] for span in nodes.spans]).T
    columns = np.minimum(np.arange(width)[None, :], lengths[:, None] - 1)
    node_of_cell = nodes.node_of_token_T[starts[:, None] + columns]
    cell_of_node = np.zeros(len(nodes.token_of_node_N), dtype=np.int64)
    is_token = np.arange(width)[None, :] < lengths[:, None]
    cell_of_node[node_of_cell[is_token]] = np.flatnonzero(is_token)
    arrays = (nodes.node_of_token_T, nodes.token_of_node_N, node_of_cell, cell_of_node)
    return PrefixTree(*(torch.from_numpy(array).to(device) for array in arrays))


def _gather_cells(states_1HND: Tensor, node_of_cell_SW: Tensor) -> Tensor:
    """Expand nodes to cells: [1, heads, N, D] to [S, heads, W, D]."""
    rows = states_1HND[0].transpose(0, 1).index_select(0, node_of_cell_SW.flatten())
    return rows.unflatten(0, node_of_cell_SW.shape).transpose(1, 2)


def _window_mask(width: int, window: int | None, device: torch.device) -> Tensor | None:
    if window is None or window >= width:
        return None
    distance = torch.arange(width, device=device)[:, None] - torch.arange(width, device=device)
    return ((distance >= 0) & (distance < window))[None, None]


_SCORES = 1 << 19
"""Scores of one block, over all heads: 1 MB in bfloat16 and 2 MB in float32, which fit into a core's cache."""
_MOST_QUERIES = 128
"""Queries per sequence and block. Fewer compute less of what the causal mask discards, but read keys more often."""
_LONG_SCORES = 1 << 24
"""Most scores of a block of one long sequence, over all heads: 64 MB in float32, in all processes that divide it."""
_PADDING, _CALL_SCORES = 1.25, 4096
"""Sequences share a block up to this ratio of padded to useful scores. A block of its own costs as much time as
`_CALL_SCORES` more of them in each head."""
_WIDTH_MULTIPLE = 32
"""PyTorch's bfloat16 softmax takes twice the time on other widths."""


@dataclass(frozen=True, slots=True)
class SequenceBlocks:
    """A packed row of T tokens as N nodes, and the blocks in which they attend."""

    node_of_token_T: Tensor
    token_of_node_N: Tensor
    blocks: list[Block]

    def options(self) -> dict[str, Any]:
        """Model arguments for the attention function. The empty mask keeps Transformers from building one."""
        return {"attention_mask": torch.empty(1, 1, 1, 1, dtype=torch.bool), "blocks": self.blocks}


def find_sequence_blocks(
    input_ids_1T: Tensor, position_ids_1T: Tensor, heads: int, *, without_last: bool = False, multiple_of: int = 1
) -> SequenceBlocks:
    """Arrange a packed row for a process with `heads` query heads. Common prefixes are computed once.

    `without_last` as in `prefix_nodes`. It has no effect on a row without common prefixes. `multiple_of` as in
    `find_shared_prefixes`: the number of processes that divide the row, and with it the memory of a block.
    """
    nodes = prefix_nodes(input_ids_1T, position_ids_1T, without_last=without_last) or _separate(position_ids_1T)
    nodes = _padded(nodes, multiple_of)
    groups = _groups(nodes, max(1, _SCORES // heads))
    limit = max(1, _LONG_SCORES // (heads * multiple_of))
    blocks = [block for members in groups for block in _blocks(nodes, members, limit)]
    return SequenceBlocks(torch.from_numpy(nodes.node_of_token_T), torch.from_numpy(nodes.token_of_node_N), blocks)


def _separate(position_ids_1T: Tensor) -> Nodes:
    """Every token is a node."""
    positions = position_ids_1T[0].numpy()
    tokens = np.arange(len(positions))
    bounds = [*sequence_starts(positions).tolist(), len(positions)]
    spans = [range(start, stop) for start, stop in pairwise(bounds)]
    return Nodes(tokens, tokens, spans, [0] * len(spans))


def _padded(nodes: Nodes, multiple_of: int) -> Nodes:
    """Nodes in a number that `multiple_of` divides. The added ones are computed in vain, from the row's first token."""
    padding = np.zeros(-len(nodes.token_of_node_N) % multiple_of, dtype=np.int64)
    return nodes._replace(token_of_node_N=np.concatenate((nodes.token_of_node_N, padding)))


def _groups(nodes: Nodes, limit: int) -> Iterator[list[int]]:
    """Group sequences of similar shape, whose scores [C, Q, W] stay below `limit` unless C = 1. Yields indices."""
    shapes = sorted(zip(nodes.shared, map(len, nodes.spans), range(len(nodes.spans)), strict=True))
    members: list[int] = []
    first = width = useful = 0
    for shared, length, index in shapes:
        if shared == length:
            continue  # every token has a node already
        own = (length - shared) * length
        wider = max(width, length)
        padded = (len(members) + 1) * (wider - first) * wider
        if members and (padded > limit or padded > _PADDING * (useful + own) + _CALL_SCORES):
            yield members
            members, useful, wider = [], 0, length
        first = shared if not members else first
        members, useful, width = [*members, index], useful + own, wider
    if members:
        yield members


def _blocks(nodes: Nodes, members: list[int], limit: int) -> Iterator[Block]:
    """The blocks of a group: its queries in order, each block with the keys up to its last query.

    `limit` is the most scores of a block, in each head.
    """
    spans, shared = [nodes.spans[index] for index in members], np.array([nodes.shared[index] for index in members])
    lengths = np.array([len(span) for span in spans])
    starts = np.array([span.start for span in spans])
    first, end = int(shared.min()), int(lengths.max())
    width = -(-end // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
    columns = np.arange(width)
    tokens = starts[:, None] + np.minimum(columns, lengths[:, None] - 1)
    nodes_CW = nodes.node_of_token_T[tokens]
    is_own = (columns >= shared[:, None]) & (columns < lengths[:, None])
    targets_CW = np.where(is_own, nodes_CW, len(nodes.token_of_node_N))
    step = min(max(limit // (len(members) * width), 1), _MOST_QUERIES)
    for start in range(first, end, step):
        stop = min(start + step, end)
        seen = -(-stop // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
        yield Block(torch.from_numpy(nodes_CW[:, :seen]), start, torch.from_numpy(targets_CW[:, start:stop]))
