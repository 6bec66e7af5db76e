"""The rubric of a verifiers environment whose rewards run in worker processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import verifiers as vf

if TYPE_CHECKING:
    from prime_rl.environments.rewards.building import Rewards


class PooledRubric(vf.Rubric):  # type: ignore[misc]
    """Each part is a function with its weight, and so a metric of its own."""

    def __init__(self, rewards: Rewards) -> None:
        functions = rewards.functions()
        super().__init__(funcs=[each for each, _ in functions], weights=[weight for _, weight in functions])
        self.rewards = rewards

    @vf.teardown  # type: ignore[untyped-decorator]
    async def let_go(self) -> None:
        """End the worker processes that no other environment uses."""
        self.rewards.close()
