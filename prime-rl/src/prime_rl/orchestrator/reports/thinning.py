"""Keeps the size of all kept rollouts below a limit."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from prime_rl.run.paths import SamplesFile
from prime_rl.utils.logger import get_logger

FILL = 0.8
"""Files are deleted until this fraction of the limit is left, so that it does not happen at every step."""


def thin_out(samples: Path, max_bytes: int) -> int:
    """Delete steps, then evaluations, until the files fit; returns the size of what is left, in bytes.

    The first and the newest of each kind stay. The others are deleted where they are densest, so that steps of the
    whole run remain.
    """
    files = SamplesFile.all_in(samples)
    sizes: dict[tuple[str, int], int] = {}
    for file in files:
        sizes[file.kind, file.number] = sizes.get((file.kind, file.number), 0) + file.path.stat().st_size
    total = sum(sizes.values())
    if total <= max_bytes:
        return total
    excess = total - int(FILL * max_bytes)
    deleted: set[tuple[str, int]] = set()
    for kind in ("step", "eval"):
        of_kind = {number: size for (each, number), size in sizes.items() if each == kind}
        for number in densest(of_kind, excess):
            deleted.add((kind, number))
            excess -= of_kind[number]
    for file in files:
        if (file.kind, file.number) in deleted:
            file.path.unlink()
    left = total - sum(sizes[each] for each in deleted)
    evaluations = sum(kind == "eval" for kind, _ in deleted)
    get_logger().warning(
        f"Kept rollouts take {total / 2**20:.1f} MiB, more than keep_rollouts.max_total_mib = {max_bytes >> 20}: "
        f"deleted those of {len(deleted) - evaluations} steps and {evaluations} evaluations, spread over the run; "
        f"{left / 2**20:.1f} MiB are left"
    )
    return left


def densest(sizes: Mapping[int, int], excess: int) -> list[int]:
    """Numbers to delete, so that `excess` bytes are freed if possible, never the first and the last.

    Each is the one whose neighbours are closest together.
    """
    numbers = sorted(sizes)
    before = {right: left for left, right in pairwise(numbers)}
    after = dict(pairwise(numbers))
    heap = [(after[number] - before[number], number) for number in numbers[1:-1]]
    heapq.heapify(heap)
    chosen: list[int] = []
    while excess > 0 and heap:
        gap, number = heapq.heappop(heap)
        left, right = before[number], after[number]
        if gap != right - left:  # a neighbour has been deleted since
            heapq.heappush(heap, (right - left, number))
            continue
        chosen.append(number)
        excess -= sizes[number]
        after[left], before[right] = right, left
    return chosen
