"""Staleness control: limits how many groups start, so that rollouts are not too old when they are trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Staleness:
    """Computes how many groups may start, and which may join a batch.

    The staleness of a group is the step that trains on it minus the policy version that it started with. Step s trains
    version s, so a staleness of 0 is on-policy.

    With a `max_staleness` of k, a group that started with version v must be in the batch of step v + k at the latest.
    Two rules guarantee that it fits:

    - The groups that are trained on, collected or in flight never exceed (k + v + 1) batches while the servers hold
      version v (staleness control; Fu et al. 2025, AReaL).
    - A group is collected only if the batches that follow still have room for all older groups in flight.
    """

    groups_per_batch: int
    max_steps: int | None = None
    """Number of steps of the run; None is unlimited."""
    max_staleness: int | None = None
    """Bound on the staleness, in steps. None sets no bound."""

    def usable(self, step: int, version: int) -> int | None:
        """Number of groups that the batch of `step` and later batches can use if they start now; None if unbounded.

        Counts the groups collected for `step` so far and those in flight.
        """
        ends = [self.max_steps, None if self.max_staleness is None else version + self.max_staleness + 1]
        known = [end for end in ends if end is not None]
        return self.groups_per_batch * (min(known) - step) if known else None

    def newest_collectable(self, step: int, collected: int, versions: Sequence[int]) -> int | None:
        """The newest version of a group that may join the batch of `step` now; None if any may.

        Args:
            collected: Number of groups in the batch so far.
            versions: Versions with which the groups in flight started.
        """
        if self.max_staleness is None:
            return None
        due_by_end = 0
        for version, count in sorted(Counter(versions).items()):
            end = max(step, version + self.max_staleness)
            due_by_end += count
            if collected + due_by_end >= self.groups_per_batch * (end - step + 1):
                return end - self.max_staleness
        return None
