"""Sequences of one prompt, attended to together: the keys and values of its tokens are read once for all of them.

Every sequence has a row of its own with all its tokens, so nothing else needs to know of this. But a decode step of
many rows takes its time for reading them, and a group's rows begin alike: one row's beginning stands for the group's.
Shapes: B running sequences, C groups of up to W members, K key-value heads, G query heads of each, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

_FEWEST_ROWS = 32
"""Below, the rows of a layer are still in the processor's cache when they are needed again."""
_FEWEST_TOKENS = 16
_FEWEST_MEMBERS = 3
"""On average, the padding of small groups included, for the way there and back to pay off."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a sequence's keys and values come from: equal for those that begin with the same `length` tokens."""

    number: int
    length: int


class CommonStart:
    """Which rows begin alike, and for how many tokens."""

    def __init__(self, groups: SequenceOf[SequenceOf[int]], length: int, device: torch.device) -> None:
        """`groups` are rows with the same first `length` tokens; each row is in one of them."""
        self.length = length
        width = max(map(len, groups))
        members = [row for rows in groups for row in (*rows, *[rows[0]] * (width - len(rows)))]
        places = {row: index * width + place for index, rows in enumerate(groups) for place, row in enumerate(rows)}
        self._shape = (len(groups), width)
        self._first_C = torch.tensor([rows[0] for rows in groups], device=device)
        self._members = torch.tensor(members, device=device)
        self._place_B = torch.tensor([places[row] for row in range(len(places))], device=device)

    @classmethod
    def of(cls, origins: SequenceOf[Origin], device: torch.device) -> CommonStart | None:
        """None where it would bring nothing. Groups of one may have fewer tokens: the rest of them is masked."""
        if device.type != "cpu" or len(origins) < _FEWEST_ROWS:
            return None
        rows: dict[Origin, list[int]] = {}
        for row, origin in enumerate(origins):
            rows.setdefault(origin, []).append(row)
        length = min((origin.length for origin, members in rows.items() if len(members) > 1), default=0)
        padded = len(rows) * max(map(len, rows.values()))
        if length < _FEWEST_TOKENS or len(rows) * _FEWEST_MEMBERS > len(origins) or padded > 2 * len(origins):
            return None
        return cls(list(rows.values()), length, device)

    def scores(self, query_BKGD: Tensor, keys: Tensor) -> Tensor:
        """Of every query with the common tokens of its group, [B, K, G, length]. `keys` are those of all rows."""
        return self._apart(self._together(query_BKGD) @ self._common(keys).transpose(1, 2), query_BKGD.shape)

    def mix(self, weights: Tensor, values: Tensor) -> Tensor:
        """The common tokens' values with their `weights` [B, K, G, length]: [B, K, G, D]."""
        return self._apart(self._together(weights) @ self._common(values), weights.shape)

    def _common(self, stored: Tensor) -> Tensor:
        """[C * K, length, D]."""
        return stored[:, :, : self.length].index_select(0, self._first_C).flatten(0, 1)

    def _together(self, rows_BKGX: Tensor) -> Tensor:
        """[C * K, W * G, X], with the padding's rows of no meaning."""
        _, heads, queries, size = rows_BKGX.shape
        groups, width = self._shape
        members = rows_BKGX.index_select(0, self._members).view(groups, width, heads, queries, size)
        return members.transpose(1, 2).reshape(groups * heads, width * queries, size)

    def _apart(self, groups: Tensor, shape: torch.Size) -> Tensor:
        """[B, K, G, X] again."""
        _, heads, queries, _ = shape
        split = groups.view(self._shape[0], heads, self._shape[1], queries, -1).transpose(1, 2)
        return split.reshape(-1, heads, queries, groups.shape[-1]).index_select(0, self._place_B)
