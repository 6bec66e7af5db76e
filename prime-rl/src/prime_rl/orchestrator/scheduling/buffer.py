"""Which example comes next, and which finished groups are worth training on."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prime_rl.configs.orchestrator import BufferConfig
from prime_rl.orchestrator.errors import NothingToTrain
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Group
from prime_rl.orchestrator.scheduling.difficulty import DifficultyPools, Fingerprint


@dataclass(slots=True)
class Counts:
    """Groups since the last report."""

    easy: int = 0
    """Turned away: all 1."""
    hard: int = 0
    """Turned away: all 0."""
    equal: int = 0
    """Turned away: all equal, and neither 0 nor 1."""
    evicted_easy: int = 0
    evicted_hard: int = 0
    groups: int = 0
    """All groups offered, accepted ones included."""


class Buffer:
    """Draws examples with replacement: an environment by ratio, then one of its rows of middling difficulty evenly.

    The n-th draw is a function of `seed`, n and the difficulty pools alone, so that a resumed run goes on with the same
    examples. Examples given back by `put_back` come first.
    """

    def __init__(
        self, num_rows: Mapping[str, int], config: BufferConfig, seed: int, fingerprint: Fingerprint = str
    ) -> None:
        self.num_rows = dict(num_rows)
        self.config = config
        self.seed = seed
        self.pools = DifficultyPools(num_rows, fingerprint)
        self.counts = Counts()
        self._draws = 0
        self._waiting: deque[ExampleRef] = deque()
        self._ratios = dict(zip(self.num_rows, config.env_ratios or self.num_rows.values(), strict=True))

    def sample(self) -> ExampleRef:
        """The next example.

        Raises:
            NothingToTrain: none is left in the normal pool.
        """
        if self._waiting:
            return self._waiting.popleft()
        # An environment keeps its share as its pool shrinks.
        envs = [env for env, rows in self.pools.normal.items() if rows]
        if not envs:
            raise NothingToTrain(
                "every example has proved easy or hard: move orchestrator.buffer.easy_threshold and hard_threshold "
                "apart, or raise easy_fraction and hard_fraction"
            )
        draw = random.Random(f"{self.seed}:{self._draws}")
        self._draws += 1
        (env,) = draw.choices(envs, [self._ratios[env] for env in envs])
        return ExampleRef(env, draw.choice(self.pools.normal[env]))

    def put_back(self, examples: Iterable[ExampleRef]) -> None:
        """Hand out these examples before drawing new ones."""
        self._waiting.extend(examples)

    def accepts(self, group: Group) -> bool:
        """Whether a finished group is trained on. Its example moves to another pool if it proved easy or hard.

        `online_difficulty_filtering` turns away means of exactly 0 and 1, `drop_equal_rewards` groups without any
        difference to learn from (dynamic sampling; Yu et al. 2025, DAPO).
        """
        self.counts.groups += 1
        self._evict(group)
        easy, hard = group.mean_reward == 1.0, group.mean_reward == 0.0
        equal = len({rollout.reward for rollout in group.rollouts}) == 1
        at_a_bound = self.config.online_difficulty_filtering and (easy or hard)
        if not at_a_bound and not (self.config.drop_equal_rewards and equal):
            return True
        self.counts.easy += easy
        self.counts.hard += hard
        self.counts.equal += not (easy or hard)
        return False

    def take_metrics(self) -> dict[str, float]:
        """Shares of the groups offered since the last call, and of the pools now."""
        counts, self.counts = self.counts, Counts()
        offered = max(counts.groups, 1)
        return {
            "filtered_rollouts/easy": counts.easy / offered,
            "filtered_rollouts/hard": counts.hard / offered,
            "filtered_rollouts/equal": counts.equal / offered,
            "evicted_examples/easy": counts.evicted_easy / offered,
            "evicted_examples/hard": counts.evicted_hard / offered,
            **self.pools.shares(),
        }

    def state(self, in_flight: Iterable[ExampleRef]) -> dict[str, Any]:
        """What a resumed run needs; examples in flight are handed out again."""
        waiting = [asdict(example) for example in (*in_flight, *self._waiting)]
        return {"seed": self.seed, "draws": self._draws, "waiting": waiting, "pools": self.pools.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Examples of environments or rows that are gone are left out.

        The configured shares of the easy and hard examples come back.
        """
        self.seed = state["seed"]
        self._draws = state["draws"]
        saved = (ExampleRef(**example) for example in state["waiting"])
        self._waiting = deque(example for example in saved if example.row < self.num_rows.get(example.env, 0))
        self.pools.restore(state["pools"])
        draw = random.Random(f"{self.seed}:{self._draws}:give back")
        self.pools.give_back("easy", self.config.easy_fraction, draw)
        self.pools.give_back("hard", self.config.hard_fraction, draw)

    def _evict(self, group: Group) -> None:
        easy, hard = self.config.easy_threshold, self.config.hard_threshold
        example = group.rollouts[0].example
        if easy is not None and group.mean_reward >= easy:
            self.counts.evicted_easy += self.pools.move(example, "easy")
        elif hard is not None and group.mean_reward <= hard:
            self.counts.evicted_hard += self.pools.move(example, "hard")
