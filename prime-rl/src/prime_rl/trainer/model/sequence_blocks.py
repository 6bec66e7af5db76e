"""Arranges a packed row for `blocked_attention`: which sequences are computed together, and which tokens only once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prime_rl.trainer.kernels.blocked_attention import Block
from prime_rl.trainer.model.packed_rows import sequence_starts
from prime_rl.trainer.model.shared_prefixes import Nodes, prefix_nodes

_SCORES = 1 << 19
"""Scores of one block, over all heads: 1 MB in bfloat16 and 2 MB in float32, which fit into a core's cache."""
_MOST_QUERIES = 128
"""Queries per sequence and block. Fewer compute less of what the causal mask discards, but read keys more often."""
_LONG_SCORES = 1 << 24
"""Most scores of a block of one long sequence, over all heads: 64 MB in float32."""
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
    input_ids_1T: Tensor, position_ids_1T: Tensor, heads: int, *, without_last: bool = False
) -> SequenceBlocks:
    """Arrange a packed row for a model with `heads` query heads. Common prefixes are computed once.

    `without_last` as in `prefix_nodes`. It has no effect on a row without common prefixes.
    """
    nodes = prefix_nodes(input_ids_1T, position_ids_1T, without_last=without_last) or _separate(position_ids_1T)
    groups = _groups(nodes, max(1, _SCORES // heads))
    blocks = [block for members in groups for block in _blocks(nodes, members, max(1, _LONG_SCORES // heads))]
    return SequenceBlocks(torch.from_numpy(nodes.node_of_token_T), torch.from_numpy(nodes.token_of_node_N), blocks)


def _separate(position_ids_1T: Tensor) -> Nodes:
    """Every token is a node."""
    positions = position_ids_1T[0].numpy()
    tokens = np.arange(len(positions))
    bounds = [*sequence_starts(positions).tolist(), len(positions)]
    spans = [range(start, stop) for start, stop in pairwise(bounds)]
    return Nodes(tokens, tokens, spans, [0] * len(spans))


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
