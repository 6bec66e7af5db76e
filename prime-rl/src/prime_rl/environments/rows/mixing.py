"""The order of all rows of several datasets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def mixed(queues: Sequence[Sequence[T]], weights: Sequence[float], seed: int) -> list[T]:
    """Every item of every queue once, each queue in its own order.

    The next queue is drawn by the weights of those that are not empty, until all are. So weights shape which items
    come first, not how many there are.
    """
    draw = random.Random(f"{seed}:mix")
    taken = [0] * len(queues)
    left = [index for index, queue in enumerate(queues) if queue]
    order = []
    while left:
        (index,) = draw.choices(left, [weights[each] for each in left])
        order.append(queues[index][taken[index]])
        taken[index] += 1
        if taken[index] == len(queues[index]):
            left.remove(index)
    return order


def shuffled(items: Sequence[T], seed: int, name: str) -> list[T]:
    """A copy in random order, which depends on `seed`, the name and the number of items only."""
    copy = list(items)
    random.Random(f"{seed}:{name}").shuffle(copy)
    return copy
