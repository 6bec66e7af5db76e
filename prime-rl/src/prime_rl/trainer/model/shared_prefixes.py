"""Prefix sharing in training: computes the common prefix of a packed row's sequences only once.

RL trains on groups of completions of one prompt. A token's hidden states depend only on the tokens before it, so all
copies of a prompt have the same ones. Here the tokens of a row become a prefix tree, in which tokens with the same
prefix are one node. The model runs on the nodes, and only attention runs on complete sequences. Results and gradients
equal those of separate sequences, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from prime_rl.trainer.kernels.blocked_attention import attend_blocks
from prime_rl.trainer.kernels.lean_linear import padded_row_count
from prime_rl.trainer.model.packed_rows import layout_cost, sequence_starts
from prime_rl.trainer.process.errors import ModelError

SHARED = "sdpa_shared_prefixes"


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Prefix tree of T tokens in S sequences, with N nodes. Attention runs on S rows as wide as the longest one, W."""

    node_of_token_T: Tensor
    token_of_node_N: Tensor
    """Index of one of the node's tokens. The last nodes may be padding, whose results are never used."""
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
    """Index of one of the node's tokens. The last nodes may be padding, whose results are never used."""
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
    # Pad with unused nodes, so that linear layers see fewer different row counts.
    tokens.append(np.zeros(padded_row_count(count) - count, dtype=np.int64))
    return Nodes(node_of_token, np.concatenate(tokens), spans, shared)


def find_shared_prefixes(
    input_ids_1T: Tensor, position_ids_1T: Tensor, *, without_last: bool = False
) -> PrefixTree | None:
    """Build the prefix tree of a packed row. Returns None if no two sequences share a prefix.

    `without_last` as in `prefix_nodes`.
    """
    nodes = prefix_nodes(input_ids_1T, position_ids_1T, without_last=without_last)
    return None if nodes is None else _tree(nodes, input_ids_1T.device)


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
    outcome, _ = sdpa_attention_forward(module, queries, keys, values, mask, **options)
    return outcome.flatten(0, 1).index_select(0, cell_of_node)[None], None


AttentionInterface.register(SHARED, shared_prefix_attention)
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
