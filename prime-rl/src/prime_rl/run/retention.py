"""The rule for which checkpoints stay, common to trainer and orchestrator."""

from __future__ import annotations

from collections.abc import Collection

DEFAULT_KEPT = 2
"""Newest checkpoints that a trainer keeps if its config has no rule: one, and another if that turns out to be bad."""


def kept_steps(steps: Collection[int], last: int | None, interval: int | None) -> set[int]:
    """The steps to keep: the newest `last`, and the multiples of `interval`. With neither, all."""
    if last is None and interval is None:
        return set(steps)
    newest = sorted(steps)[-last:] if last else []
    return {*newest, *(step for step in steps if interval and step % interval == 0)}
