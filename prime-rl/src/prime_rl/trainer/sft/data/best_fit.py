"""Bin packing: whole samples into rows of equal capacity, with little left free."""

from __future__ import annotations

import numpy as np


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each of n lengths: longest first, each into the fullest bin that has room for it.

    Best-fit decreasing uses at most 11/9 of the fewest possible bins, plus 4 (Johnson and others 1974). The bins with
    room are kept by how much of it they have, and the free rooms as the bits of one integer, so finding the smallest
    room that suffices is a shift and a lowest bit: sorting, and capacity / 64 machine words a sample.

    Raises:
        ValueError: a length is above `capacity`.
    """
    bins = np.empty(len(lengths), dtype=np.int64)
    if len(lengths) == 0:
        return bins
    if int(lengths.max()) > capacity:
        raise ValueError(f"a length of {int(lengths.max())} is above the capacity of {capacity}")
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
    """Share of the bins' room that is taken."""
    return float(lengths.sum()) / ((int(bins.max()) + 1) * capacity) if len(bins) else 1.0
