"""Bin packing: puts whole samples into as few rows of equal capacity as possible."""

from __future__ import annotations

import numpy as np


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Assign each of n lengths to a bin, longest first, each to the fullest bin that has room for it.

    Best-fit decreasing uses at most 11/9 of the optimal number of bins, plus 4 (Johnson et al. 1974). Bins are grouped
    by their free room, and the bits of one integer say which rooms exist. Finding the smallest sufficient room is then
    a shift and the lowest set bit: capacity / 64 machine words per sample, after sorting.

    Raises:
        ValueError: a length exceeds `capacity`.
    """
    bins = np.empty(len(lengths), dtype=np.int64)
    if len(lengths) == 0:
        return bins
    if int(lengths.max()) > capacity:
        raise ValueError(f"length {int(lengths.max())} exceeds the capacity of {capacity}")
    with_room: dict[int, list[int]] = {}
    rooms, count = 0, 0
    order = np.argsort(-lengths, kind="stable")
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            same_room = with_room[room]
            chosen = same_room.pop()
            if not same_room:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, count
            count += 1
        bins[index] = chosen
        left = room - length
        if left:
            with_room.setdefault(left, []).append(chosen)
            rooms |= 1 << left
    return bins


def fill_of(lengths: np.ndarray, bins: np.ndarray, capacity: int) -> float:
    """Fraction of the bins' capacity that is used."""
    return float(lengths.sum()) / ((int(bins.max()) + 1) * capacity) if len(bins) else 1.0
