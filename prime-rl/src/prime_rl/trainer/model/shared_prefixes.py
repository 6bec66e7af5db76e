"""Sequences of a packed row that begin alike, computed only once where they do.

RL trains on groups of answers to one prompt. A token's hidden states depend on the tokens before it and nothing else,
so the copies of a prompt have the same ones. Here the tokens of a row become a tree: tokens with the same past are one
node. The model runs over the nodes; its attention alone sees whole sequences again. Results and gradients are those
of the sequences one by one, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from prime_rl.trainer.kernels.attention_apart import attend_apart
from prime_rl.trainer.kernels.lean_linear import row_count
from prime_rl.trainer.model.packed_rows import layout_cost, sequence_starts

SHARED = "sdpa_shared_prefixes"


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """T tokens of S sequences as N nodes. Attention takes them as S rows, as wide as the longest sequence (W)."""

    node_of_token_T: Tensor
    token_of_node_N: Tensor
    """One of the tokens that the node stands for. The last nodes may stand for none, and are never read."""
    node_of_cell_SW: Tensor
    """Padding on the right repeats the sequence's last node, which causal attention never shows to the others."""
    cell_of_node_N: Tensor
    """Flat index of a cell where the node's outcome is read."""

    def cost(self, hidden_size: int) -> int:
        """Comparable with `layout_cost`: linear layers see nodes, attention sees cells."""
        cells, width = self.node_of_cell_SW.numel(), self.node_of_cell_SW.shape[1]
        return layout_cost(len(self.token_of_node_N), 0, hidden_size) + layout_cost(cells, width, 0)

    def options(self) -> dict[str, Any]:
        """What the model's attention is told, as arguments of the model. The mask only keeps others from being made."""
        nothing = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=self.node_of_token_T.device)
        return {
            "attention_mask": nothing,
            "node_of_cell": self.node_of_cell_SW,
            "cell_of_node": self.cell_of_node_N,
        }


def find_shared_prefixes(input_ids_1T: Tensor, position_ids_1T: Tensor) -> PrefixTree | None:
    """The tree of a packed row, or None where no two sequences begin alike."""
    ids, positions = input_ids_1T[0].cpu().numpy(), position_ids_1T[0].cpu().numpy()
    starts = sequence_starts(positions)
    bounds = [*starts.tolist(), len(ids)]
    spans = [range(*pair) for pair in pairwise(bounds)]
    # Side by side in order, each sequence has its longest common beginning with the one before it.
    spans.sort(key=lambda span: (positions[span.start], ids[span.start : span.stop].tolist()))
    node_of_token = np.empty(len(ids), dtype=np.int64)
    tokens: list[np.ndarray] = []
    count = 0
    before = range(0)
    for span in spans:
        shared = _common(ids, positions, before, span)
        node_of_token[span.start : span.start + shared] = node_of_token[before.start : before.start + shared]
        own = np.arange(span.start + shared, span.stop)
        node_of_token[own] = np.arange(count, count + len(own))
        tokens.append(own)
        count += len(own)
        before = span
    if count == len(ids):
        return None
    # Nodes that nobody reads, so that linear layers see few different numbers of rows.
    tokens.append(np.zeros(row_count(count) - count, dtype=np.int64))
    return _tree(node_of_token, np.concatenate(tokens), spans, input_ids_1T.device)


def shared_prefix_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """SDPA behind Transformers' attention interface: [B, heads, T, D] in, [B, T, heads, D] out.

    B = 1 for a tree, and for a row of `sequence_lengths` that are computed apart.
    """
    lengths = options.pop("sequence_lengths", None)
    if lengths is not None:
        return attend_apart(query[0], key[0], value[0], lengths, options["scaling"])[None], None
    node_of_cell, cell_of_node = options.pop("node_of_cell", None), options.pop("cell_of_node", None)
    if node_of_cell is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    queries, keys, values = (_cells_of(states, node_of_cell) for states in (query, key, value))
    mask = _window_mask(node_of_cell.shape[1], options.get("sliding_window"), query.device)
    outcome, _ = sdpa_attention_forward(module, queries, keys, values, mask, **options)
    return outcome.flatten(0, 1).index_select(0, cell_of_node)[None], None


AttentionInterface.register(SHARED, shared_prefix_attention)
AttentionMaskInterface.register(SHARED, sdpa_mask)


def _common(ids: np.ndarray, positions: np.ndarray, first: range, second: range) -> int:
    """How many tokens two sequences have in common at their beginning."""
    length = min(len(first), len(second))
    if length == 0 or positions[first.start] != positions[second.start]:
        return 0
    differs = ids[first.start : first.start + length] != ids[second.start : second.start + length]
    return int(np.argmax(differs)) if differs.any() else length


def _tree(node_of_token: np.ndarray, token_of_node: np.ndarray, spans: list[range], device: torch.device) -> PrefixTree:
    width = max(map(len, spans))
    starts, lengths = np.array([[span.start, len(span)] for span in spans]).T
    columns = np.minimum(np.arange(width)[None, :], lengths[:, None] - 1)
    node_of_cell = node_of_token[starts[:, None] + columns]
    cell_of_node = np.zeros(len(token_of_node), dtype=np.int64)
    is_token = np.arange(width)[None, :] < lengths[:, None]
    cell_of_node[node_of_cell[is_token]] = np.flatnonzero(is_token)
    arrays = (node_of_token, token_of_node, node_of_cell, cell_of_node)
    return PrefixTree(*(torch.from_numpy(array).to(device) for array in arrays))


def _cells_of(states_1HND: Tensor, node_of_cell_SW: Tensor) -> Tensor:
    """[1, heads, N, D] to [S, heads, W, D]."""
    rows = states_1HND[0].transpose(0, 1).index_select(0, node_of_cell_SW.flatten())
    return rows.unflatten(0, node_of_cell_SW.shape).transpose(1, 2)


def _window_mask(width: int, window: int | None, device: torch.device) -> Tensor | None:
    if window is None or window >= width:
        return None
    distance = torch.arange(width, device=device)[:, None] - torch.arange(width, device=device)
    return ((distance >= 0) & (distance < window))[None, None]
