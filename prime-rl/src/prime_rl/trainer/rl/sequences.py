"""Sums and means over each sequence of a packed row, for all of its sequences at once.

A loss that goes through the sequences one by one takes hundreds of small operations for each. On a GPU it would also
wait several times for each, because the number of a mask's true elements is known only there. So the layout of a row is
computed on the host, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from prime_rl.transport.to_device import to_device


@dataclass(frozen=True, slots=True)
class Sequences:
    """S sequences with M trained tokens in all, which lie one after another. Each has at least one."""

    lengths_S: Tensor
    """Number of trained tokens of each, float32."""
    sequence_of_M: Tensor
    cell_of_M: Tensor
    """Place of each token in a grid with one row per sequence, as wide as the longest."""
    longest: int

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device) -> Self:
        counts, longest = np.array(lengths, dtype=np.int64), max(lengths, default=0)
        sequence_of = np.repeat(np.arange(len(counts)), counts)
        first_of = np.cumsum(counts) - counts
        cell_of = sequence_of * longest + np.arange(len(sequence_of)) - first_of[sequence_of]
        numbers, sequence, cell = (
            to_device(torch.from_numpy(each), device) for each in (counts.astype(np.float32), sequence_of, cell_of)
        )
        return cls(numbers, sequence, cell, longest)

    def __len__(self) -> int:
        return len(self.lengths_S)

    def sum(self, values_M: Tensor) -> Tensor:
        """The sum over each sequence's tokens, [S]. It has a gradient."""
        return self._grid(values_M, 0).sum(1)

    def mean(self, values_M: Tensor) -> Tensor:
        """[S]"""
        return self.sum(values_M) / self.lengths_S

    def min(self, values_M: Tensor) -> Tensor:
        """[S]"""
        return self._grid(values_M, torch.inf).amin(1)

    def max(self, values_M: Tensor) -> Tensor:
        """[S]"""
        return self._grid(values_M, -torch.inf).amax(1)

    def spread(self, values_S: Tensor) -> Tensor:
        """Each token gets its sequence's value, [M]."""
        return values_S.index_select(0, self.sequence_of_M)

    def _grid(self, values_M: Tensor, padding: float) -> Tensor:
        # Every cell is written at most once, so that the sum's order, and with it its rounding, is always the same.
        cells = values_M.new_full((len(self) * self.longest,), padding)
        return cells.index_copy(0, self.cell_of_M, values_M).view(len(self), self.longest)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the sequences of a packed row of T tokens are, and which of their tokens are trained (masked in)."""

    lengths: list[int]
    """Number of tokens of each sequence; they sum to T."""
    num_trained: list[int]
    """Number of trained tokens of each sequence; they sum to M."""
    trained_M: Tensor
    """Index of each trained token in the row."""
    sequences: Sequences
    """Those with trained tokens."""

    @classmethod
    def of_mask(cls, loss_mask_T: Tensor, lengths: list[int], device: torch.device) -> Self:
        """`loss_mask_T` is on the host; the result's tensors are on `device`."""
        num_trained = [int(mask.sum()) for mask in loss_mask_T.split(lengths)]
        trained = to_device(loss_mask_T.nonzero().flatten(), device)
        return cls(lengths, num_trained, trained, Sequences.of_lengths([each for each in num_trained if each], device))
