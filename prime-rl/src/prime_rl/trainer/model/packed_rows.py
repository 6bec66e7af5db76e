"""Packed rows under attention kernels that know no packing.

A micro-batch is one row of T tokens that holds several sequences. Flash attention takes it as it is. SDPA would
build a T x T mask and score T * T pairs, nearly all of them masked: 30 times slower on a CPU for 64 sequences of 64
tokens. Here the same sequences are laid out as a grid of short rows first, and the result is put back in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Grid:
    """Where each of a row's T tokens stands in a grid of R rows of W cells."""

    cells_T: Tensor
    """Flat index into the R * W cells."""
    position_ids_RW: Tensor
    """Positions of the tokens; padding behind the last sequence of a row counts on, so it starts no sequence."""

    def place(self, row_1T: Tensor) -> Tensor:
        """Lay a row out as [R, W]; padding is 0."""
        grid = row_1T.new_zeros(self.position_ids_RW.numel())
        grid[self.cells_T] = row_1T[0]
        return grid.view(self.position_ids_RW.shape)

    def cost(self, hidden_size: int) -> int:
        return layout_cost(self.position_ids_RW.numel(), self.position_ids_RW.shape[1], hidden_size)

    def collect(self, grid_RWH: Tensor) -> Tensor:
        """The T cells that hold tokens, in the row's order: [T, H]."""
        return grid_RWH.flatten(0, 1).index_select(0, self.cells_T)


def fold(position_ids_1T: Tensor, hidden_size: int) -> Grid:
    """Choose the cheaper of two layouts: the row as it is, or rows as wide as the longest sequence.

    A sequence starts wherever the position is not the previous one plus 1, as in Transformers' packed mask.
    """
    positions = position_ids_1T[0].cpu().numpy()
    starts = sequence_starts(positions)
    lengths = np.diff(np.append(starts, len(positions)))
    width = int(lengths.max())
    rows, columns, row_count = _first_fit_decreasing(lengths, width)
    unfolded_cost = layout_cost(len(positions), len(positions), hidden_size)
    if layout_cost(row_count * width, width, hidden_size) >= unfolded_cost:
        cells = torch.arange(len(positions), device=position_ids_1T.device)
        return Grid(cells, position_ids_1T)
    within = np.arange(len(positions)) - np.repeat(starts, lengths)
    cells = np.repeat(rows * width + columns, lengths) + within
    last_start = np.zeros(row_count, dtype=np.int64)
    np.maximum.at(last_start, rows, columns)
    grid = np.arange(width)[None, :] - last_start[:, None]
    grid.flat[cells] = positions
    device = position_ids_1T.device
    return Grid(torch.from_numpy(cells).to(device), torch.from_numpy(grid).to(device))


def layout_cost(cells: int, width: int, hidden_size: int) -> int:
    """Cells take about 24 H^2 FLOP each in a block's linear layers and 4 H W in attention: in units of 4 H."""
    return cells * (6 * hidden_size + width)


def sequence_bounds(position_ids_1T: Tensor) -> tuple[Tensor, int]:
    """Where each of a row's S sequences starts, and the row's end: [S + 1], int32; and the longest one's length."""
    positions = position_ids_1T[0].cpu().numpy()
    bounds = np.append(sequence_starts(positions), len(positions)).astype(np.int32)
    return torch.from_numpy(bounds).to(position_ids_1T.device), int(np.diff(bounds).max())


def sequence_starts(positions: np.ndarray) -> np.ndarray:
    """Where the sequences of a row start."""
    return np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) != 1)


def _first_fit_decreasing(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Put each sequence into the first row with room, longest first: (row, first column) of each, and the row count."""
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
