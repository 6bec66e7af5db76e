"""Compares the values of two configs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from medarc_rl.explain.origins import Explained
from medarc_rl.explain.screen import MAX_VALUE_CHARS, as_json, shortened
from prime_rl.utils.pydantic_config.describe import value_text


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose value differs. `mine` or `other` is None if its config lacks the key."""

    key: str
    mine: Explained | None
    other: Explained | None

    def as_json(self) -> list[Any]:
        return [None if side is None else as_json([side])[side.key] for side in (self.mine, self.other)]


def differences(mine: Sequence[Explained], other: Sequence[Explained]) -> list[Difference]:
    """The keys that differ, in the order of the first config. Paths are compared as they are written."""
    others = {each.key: each for each in other}
    mines = {each.key: each for each in mine}
    keys = dict.fromkeys([*mines, *others])
    pairs = [Difference(key, mines.get(key), others.get(key)) for key in keys]
    return [each for each in pairs if each.mine is None or each.other is None or each.mine.value != each.other.value]


def difference_lines(found: Sequence[Difference], mine: str, other: str) -> Iterator[str]:
    """A line for the key, and one for each side."""
    if not found:
        yield f"{mine} and {other} have the same values"
    width = max(len(mine), len(other))
    for each in found:
        # The keys of a section that only one side has are listed themselves.
        is_section = any(one.key.startswith(f"{each.key}.") for one in found)
        yield each.key
        for name, side in ((mine, each.mine), (other, each.other)):
            if side is not None:
                shown = f"{shortened(value_text(side.value), MAX_VALUE_CHARS)}  ({side.origin})"
            else:
                shown = "a section" if is_section else "not there"
            yield f"  {name:{width}}  {shown}"
