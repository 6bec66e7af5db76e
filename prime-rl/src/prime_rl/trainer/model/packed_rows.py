"""Unpacks a packed row into a grid of shorter rows, for attention kernels without support for packing.

A micro-batch is one row of T tokens with several sequences. Flash attention processes it directly. SDPA would build a
T x T mask and compute T * T scores, nearly all of them masked: 30 times slower on a CPU for 64 sequences of 64 tokens.
Here the sequences are arranged as a grid of short rows, and the results are gathered in the original order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prime_rl.transport.to_device import to_device


@dataclass(frozen=True, slots=True)
class Grid:
    """Position of each of a packed row's T tokens in a grid of R rows of W cells."""

    cells_T: Tensor
    """Flat index of each token's cell, in R * W cells."""
    position_ids_RW: Tensor
    """Position ids. Padding after a row's last sequence continues its positions, so that it starts no new sequence."""

    def scatter(self, row_1T: Tensor) -> Tensor:
        """Arrange a packed row as [R, W], padded with 0."""
        grid = row_1T.new_zeros(self.position_ids_RW.numel())
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
