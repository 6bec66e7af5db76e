"""Which example comes next, and which finished groups are worth training on."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from prime_rl.configs.orchestrator import BufferConfig
from prime_rl.orchestrator.rollout import ExampleRef, Group


@dataclass(slots=True)
class Filtered:
    """Groups turned away since the last report."""

    easy: int = 0
    hard: int = 0
    equal: int = 0
    """Of rewards that are all equal, and neither all 0 nor all 1."""
    groups: int = 0
    """All groups offered, accepted ones included."""


class Buffer:
    """Draws examples with replacement: an environment by ratio, then one of its rows evenly.

    The n-th draw is a function of `seed` and n alone, so that its state is one number and a resumed run goes on with
    the same examples. Examples given back by `put_back` come first.
    """

    def __init__(self, num_rows: Mapping[str, int], config: BufferConfig, seed: int) -> None:
        self.num_rows = dict(num_rows)
        self.config = config
        self.seed = seed
        self.filtered = Filtered()
        self._draws = 0
        self._waiting: deque[ExampleRef] = deque()
        ratios = config.env_ratios or list(self.num_rows.values())
        self._cumulative = list(accumulate(ratios))

    def sample(self) -> ExampleRef:
        if self._waiting:
            return self._waiting.popleft()
        draw = random.Random(f"{self.seed}:{self._draws}")
        self._draws += 1
        (env,) = draw.choices(list(self.num_rows), cum_weights=self._cumulative)
        return ExampleRef(env, draw.randrange(self.num_rows[env]))

    def put_back(self, examples: Iterable[ExampleRef]) -> None:
        """Hand out these examples before drawing new ones."""
        self._waiting.extend(examples)

    def accepts(self, group: Group) -> bool:
        """Whether a finished group is trained on.

        `online_difficulty_filtering` turns away means of exactly 0 and 1, `drop_equal_rewards` groups without any
        difference to learn from (dynamic sampling; Yu et al. 2025, DAPO).
        """
        self.filtered.groups += 1
        easy, hard = group.mean_reward == 1.0, group.mean_reward == 0.0
        equal = len({rollout.reward for rollout in group.rollouts}) == 1
        at_a_bound = self.config.online_difficulty_filtering and (easy or hard)
        if not at_a_bound and not (self.config.drop_equal_rewards and equal):
            return True
        self.filtered.easy += easy
        self.filtered.hard += hard
        self.filtered.equal += not (easy or hard)
        return False

    def take_metrics(self) -> dict[str, float]:
        """Shares of the groups offered since the last call."""
        filtered, self.filtered = self.filtered, Filtered()
        offered = max(filtered.groups, 1)
        return {
            "filtered_rollouts/easy": filtered.easy / offered,
            "filtered_rollouts/hard": filtered.hard / offered,
            "filtered_rollouts/equal": filtered.equal / offered,
        }

    def state(self, in_flight: Iterable[ExampleRef]) -> dict[str, Any]:
        """What a resumed run needs; examples in flight are handed out again."""
        waiting = [*in_flight, *self._waiting]
        return {"seed": self.seed, "draws": self._draws, "waiting": [asdict(example) for example in waiting]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Examples of environments or rows that are gone are left out."""
        self.seed = state["seed"]
        self._draws = state["draws"]
        saved = (ExampleRef(**example) for example in state["waiting"])
        self._waiting = deque(example for example in saved if example.row < self.num_rows.get(example.env, 0))
