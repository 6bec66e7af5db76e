"""Prefix sharing in training: computes the common prefix of a packed row's sequences only once.

RL trains on groups of completions of one prompt. A token's hidden states depend only on the tokens before it, so all
copies of a prompt have the same ones. Here the tokens of a row become a prefix tree, in which tokens with the same
prefix are one node. The model runs on the nodes, and only attention runs on complete sequences. Results and gradients
equal those of separate sequences, up to rounding.
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

from prime_rl.trainer.kernels.attention_apart import attend_per_sequence
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


def find_shared_prefixes(
    input_ids_1T: Tensor, position_ids_1T: Tensor, *, without_last: bool = False
) -> PrefixTree | None:
    """Build the prefix tree of a packed row. Returns None if no two sequences share a prefix.

    `without_last`: the last token of a sequence, after which nothing is predicted, has no node of its own. It refers to
    that of the token before it.
    """
    ids, positions = input_ids_1T[0].cpu().numpy(), position_ids_1T[0].cpu().numpy()
    starts = sequence_starts(positions)
    bounds = [*starts.tolist(), len(ids)]
    spans = [range(start, max(stop - without_last, start + 1)) for start, stop in pairwise(bounds)]
    # In sorted order, each sequence shares its longest common prefix with the one before it.
    spans.sort(key=lambda span: (positions[span.start], ids[span.start : span.stop].tolist()))
    node_of_token = np.empty(len(ids), dtype=np.int64)
    tokens: list[np.ndarray] = []
    count = 0
    before = range(0)
    for span in spans:
        shared = _common_prefix_length(ids, positions, before, span)
        node_of_token[span.start : span.start + shared] = node_of_token[before.start : before.start + shared]
        own = np.arange(span.start + shared, span.stop)
        node_of_token[own] = np.arange(count, count + len(own))
        tokens.append(own)
        count += len(own)
        before = span
    if count == sum(map(len, spans)):
        return None
    if without_last:
        last = np.array(bounds[1:]) - 1
        node_of_token[last] = node_of_token[np.maximum(last - 1, starts)]
    # Pad with unused nodes, so that linear layers see fewer different row counts.
    tokens.append(np.zeros(padded_row_count(count) - count, dtype=np.int64))
    return _tree(node_of_token, np.concatenate(tokens), spans, input_ids_1T.device)


def shared_prefix_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """SDPA behind Transformers' attention interface: [B, heads, T, D] in, [B, T, heads, D] out.

    B = 1 for a prefix tree (`node_of_cell`) and for attention per sequence (`sequence_lengths`).

    Raises:
        ModelError: the model needs a soft cap, sinks or a bias of the scores, or something else that the layout lacks.
    """
    if any(options.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise ModelError(f"{type(module).__name__} is not supported by SDPA: soft caps, sinks or biases of scores")
    lengths, window = options.pop("sequence_lengths", None), options.get("sliding_window")
    if lengths is not None:
        if (window or max(lengths)) < max(lengths) or query.shape[-1] != value.shape[-1]:
            raise ModelError(f"{type(module).__name__} has a window or values of another head dim than its queries")
        return attend_per_sequence(query[0], key[0], value[0], lengths, options["scaling"])[None], None
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


def _gather_cells(states_1HND: Tensor, node_of_cell_SW: Tensor) -> Tensor:
    """Expand nodes to cells: [1, heads, N, D] to [S, heads, W, D]."""
    rows = states_1HND[0].transpose(0, 1).index_select(0, node_of_cell_SW.flatten())
    return rows.unflatten(0, node_of_cell_SW.shape).transpose(1, 2)


def _window_mask(width: int, window: int | None, device: torch.device) -> Tensor | None:
    if window is None or window >= width:
        return None
    distance = torch.arange(width, device=device)[:, None] - torch.arange(width, device=device)
    return ((distance >= 0) & (distance < window))[None, None]
