"""Packs kept rollouts for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prime_rl.history.run import RunHistory


@dataclass(slots=True)
class PackedRollouts:
    """What the page embeds: base64 of gzip of JSON, so that no character of a rollout reaches the HTML."""

    index: str = ""
    blocks: list[str] = field(default_factory=list)
    count: int = 0
    left_out: int = 0
    notes: list[str] = field(default_factory=list)
    answers: dict[int, dict[int, list[tuple[object, str]]]] = field(default_factory=dict)
    """By number of the run and step: problem and text of each completion that was kept by chance."""


def pack_rollouts(runs: Sequence[RunHistory], names: Sequence[str]) -> PackedRollouts:
    """Nothing yet: the reader of kept rollouts comes with them."""
    return PackedRollouts()
