"""Assigns dataset entries to data ranks, and reassigns them when their number changes on resume.

With n data ranks, entry i belongs to rank i mod n. Ranks read at different speeds, so when n ranks stop, some entries
before the farthest position are unread, and packers hold samples that wait for a row. `redistribute` divides all of
them among m ranks: each entry is read once, and each waiting sample is used once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prime_rl.trainer.process.mesh import DataAxis

Place = Mapping[str, Any]
"""Position of one data rank in the data, as saved in a checkpoint: plain values and bytes."""


class Places:
    """The entries of one data rank, in increasing order."""

    def __init__(self, data_axis: DataAxis) -> None:
        self._stride = data_axis.data_size
        self._next = data_axis.data_rank
        self._left_over: list[int] = []

    @property
    def next(self) -> int:
        """The entry that `take` returns next."""
        return self._left_over[0] if self._left_over else self._next

    def take(self) -> int:
        if self._left_over:
            return self._left_over.pop(0)
        taken, self._next = self._next, self._next + self._stride
        return taken

    def state(self) -> dict[str, Any]:
        return {"position": self._next, "left_over": list(self._left_over)}

    def restore(self, state: Place) -> None:
        self._next, self._left_over = state["position"], list(state["left_over"])


def redistribute(places: Sequence[Place], data_rank: int, data_size: int) -> dict[str, Any]:
    """The position of rank `data_rank` of `data_size`, from the saved positions of all data ranks in order."""
    farthest = max(place["position"] for place in places)
    behind = (range(place["position"], farthest, len(places)) for place in places)
    left_over = sorted(chain(*behind, *(place["left_over"] for place in places)))
    # Each piece of a row that was split is used once, by whichever rank.
    pieces = [piece for place in places for piece in place.get("pieces", ())]
    counts: Counter[str] = sum((Counter(place["counts"]) for place in places), Counter())
    # Reading starts where the slowest rank stopped: every unread entry comes after that.
    hindmost = min(places, key=lambda place: min([place["position"], *place["left_over"]]))
    return {
        **hindmost,
        "position": farthest + (data_rank - farthest) % data_size,
        "left_over": left_over[data_rank::data_size],
        "pieces": pieces[data_rank::data_size],
        "counts": dict(counts) if data_rank == 0 else {},
        "waiting": _redistribute_samples([place["waiting"] for place in places], data_rank, data_size),
        "data_rank": data_rank,
        "data_size": data_size,
    }


def saved_data_size(place: Place) -> int:
    """Number of data ranks of the run that saved `place`."""
    # Older checkpoints call it `world_size`: each process was a data rank.
    return place["data_size"] if "data_size" in place else place["world_size"]


def _redistribute_samples(waiting: Sequence[Mapping[str, Any]], data_rank: int, data_size: int) -> dict[str, Any]:
    """The state of one packer, from the states of all."""
    own = slice(data_rank, None, data_size)
    if "held_back" in waiting[0]:
        # Every rank takes rows from the end of its list, so interleave the lists from their ends.
        rounds = zip_longest(*(reversed(state["rows"]) for state in waiting))
        rows = [row for row in chain.from_iterable(rounds) if row is not None]
        return {"rows": rows[own][::-1], "held_back": list(chain(*(state["held_back"] for state in waiting)))[own]}
    if "buckets" in waiting[0]:
        return _redistribute_buckets(waiting, own)
    return {}


def _redistribute_buckets(waiting: Sequence[Mapping[str, Any]], own: slice) -> dict[str, Any]:
    row_tokens = max(waiting[0]["buckets"])
    emitted = max(state["emitted"] for state in waiting)
    ready = list(chain(*(state["ready"] for state in waiting)))[own]
    buckets, touched_at = {}, {}
    for size in waiting[0]["buckets"]:
        samples = list(chain(*(state["buckets"][size] for state in waiting)))[own]
        # The buckets of several ranks together may fill rows.
        places = row_tokens // size
        whole = len(samples) // places * places
        ready += [samples[start : start + places] for start in range(0, whole, places)]
        buckets[size] = samples[whole:]
        touched_at[size] = emitted - min(state["emitted"] - state["touched_at"][size] for state in waiting)
    return {"ready": ready, "buckets": buckets, "touched_at": touched_at, "emitted": emitted}
