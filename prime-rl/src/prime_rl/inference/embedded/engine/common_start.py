"""Shared-prefix attention: decoding reads the keys and values of a prompt once for all sequences sampled from it.

Every sequence still stores all its tokens in its own row, so the rest of the engine is unaffected. Decoding many rows
is bound by reading them from memory, and the rows of a group start with the same tokens, so the start of one row is
read in place of the others.
Shapes: B running sequences, C groups of up to W members, K key-value heads, G query heads per key-value head, D head
dim.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prime_rl.inference.embedded.engine.tensors import on_device

if TYPE_CHECKING:
    from prime_rl.inference.embedded.engine.vision import PromptImages

FEWEST_ROWS = 32
"""With fewer rows, a layer's rows stay in the processor's cache and sharing gains nothing."""
_FEWEST_TOKENS = 16
_FEWEST_MEMBERS = 3
"""Minimum average group size for which gathering and scattering the rows pays off."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Identifies a prompt's keys and values. Sequences with equal origins share their first `length` tokens."""

    number: int
    length: int
    images: PromptImages | None = field(default=None, compare=False)

    @property
    def shift(self) -> int:
        """What tokens behind the prompt add to their place to have their position."""
        return 0 if self.images is None else self.images.shift


class CommonStart:
    """Groups of rows that share their first `length` tokens."""

    def __init__(self, groups: SequenceOf[SequenceOf[int]], length: int, device: torch.device) -> None:
        """Each of `groups` lists rows with the same first `length` tokens. Every row is in exactly one group."""
        self.length = length
        width = max(map(len, groups))
        members = [row for rows in groups for row in (*rows, *[rows[0]] * (width - len(rows)))]
        places = {row: index * width + place for index, rows in enumerate(groups) for place, row in enumerate(rows)}
        self._shape = (len(groups), width)
        self._leader_C = on_device([rows[0] for rows in groups], device)
        self._members = on_device(members, device)
        self._position_B = on_device([places[row] for row in range(len(places))], device)

    @classmethod
    def from_origins(
        cls, origins: SequenceOf[Origin], device: torch.device, fewest_rows: int = FEWEST_ROWS
    ) -> CommonStart | None:
        """Group rows by origin. Returns None if sharing would not pay off.

        Groups of one row may have fewer tokens than the shared length: the tokens beyond their end are masked.
        """
        if device.type != "cpu" or len(origins) < fewest_rows:
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
        """Attention scores [B, K, G, length] of every query with its group's shared tokens. `keys` are of all rows."""
        return self._scatter_rows(
            self._gather_groups(query_BKGD) @ self._prefixes(keys).transpose(1, 2), query_BKGD.shape
        )

    def mix(self, weights: Tensor, values: Tensor) -> Tensor:
        """Sum of the shared tokens' values, weighted by `weights` [B, K, G, length]: [B, K, G, D]."""
        return self._scatter_rows(self._gather_groups(weights) @ self._prefixes(values), weights.shape)

    def _prefixes(self, stored: Tensor) -> Tensor:
        """The shared tokens of every group, [C * K, length, D]."""
        return stored[:, :, : self.length].index_select(0, self._leader_C).flatten(0, 1)

    def _gather_groups(self, rows_BKGX: Tensor) -> Tensor:
        """Rows gathered by group, [C * K, W * G, X]. Smaller groups are padded with repeats of their first row."""
        _, heads, queries, size = rows_BKGX.shape
        groups, width = self._shape
        members = rows_BKGX.index_select(0, self._members).view(groups, width, heads, queries, size)
        return members.transpose(1, 2).reshape(groups * heads, width * queries, size)

    def _scatter_rows(self, groups: Tensor, shape: torch.Size) -> Tensor:
        """Inverse of `_gather_groups`: [B, K, G, X]."""
        _, heads, queries, _ = shape
        split = groups.view(self._shape[0], heads, self._shape[1], queries, -1).transpose(1, 2)
        return split.reshape(-1, heads, queries, groups.shape[-1]).index_select(0, self._position_B)
