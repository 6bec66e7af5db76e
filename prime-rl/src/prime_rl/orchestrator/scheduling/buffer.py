"""The buffer: draws training examples, keeps easy and hard ones out, and rejects groups without a learning signal."""

from __future__ import annotations

import hashlib
import json
import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from prime_rl.configs.orchestrator import BufferConfig
from prime_rl.orchestrator.errors import EnvironmentFault, OrchestratorError
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Group
from prime_rl.run.ledger import Ledger
from prime_rl.utils.logger import count_of, get_logger

Difficulty = Literal["easy", "hard"]
Fingerprint = Callable[[ExampleRef], str]
EVERY_0, EVERY_1, EQUAL = "every reward 0", "every reward 1", "equal rewards"
ADVICE = {
    EVERY_0: "use easier examples, raise rollouts_per_example, or check the reward functions",
    EVERY_1: "use harder examples, or raise rollouts_per_example",
    EQUAL: "raise rollouts_per_example, or use rewards that differ",
}
"""How to get groups that are not rejected, by the most frequent reason."""


class Buffer:
    """Draws examples: first an environment by ratio, then a row of its normal pool, at random or in turn.

    A random row is drawn with replacement, and depends only on `seed`, the number of draws and the difficulty pools.
    In turn, the next row follows the last one; after the end of the dataset comes its beginning. So a resumed run
    continues with the same examples. Examples that were in flight when the state was saved
    come first. Rows of an endless environment are drawn in their order, each once, and are in no pool.

    Records draws and rejections in `ledger`. The scheduler and the steps add to it, so one file has the fate of each
    example.
    """

    def __init__(
        self,
        num_rows: Mapping[str, int | None],
        config: BufferConfig,
        seed: int,
        fingerprint: Fingerprint = str,
        ledger: Ledger | None = None,
    ) -> None:
        self.ledger = ledger or Ledger()
        self.num_rows = dict(num_rows)
        """None for an endless environment."""
        self.config = config
        self.seed = seed
        self.pools = DifficultyPools({env: count or 0 for env, count in num_rows.items()}, fingerprint)
        self._endless = [env for env, count in num_rows.items() if count is None]
        self._next_rows = dict.fromkeys(self._endless if config.order == "random" else num_rows, 0)
        """Next row of each environment whose rows are drawn in turn."""
        self._fingerprint = fingerprint
        self.counts = GroupCounts()
        self._draws = 0
        self._waiting: deque[ExampleRef] = deque()
        self._ratios = dict(zip(self.num_rows, config.env_ratios or self._sizes(), strict=True))

    def _sizes(self) -> list[float]:
        """Ratios without `env_ratios`: numbers of rows. An endless environment must be the only one."""
        if self._endless and len(self.num_rows) > 1:
            names = ", ".join(map(repr, self._endless))
            raise EnvironmentFault(
                f"{names} has endless rows, so its share among several environments is unknown: set buffer.env_ratios"
            )
        return [1.0 if count is None else float(count) for count in self.num_rows.values()]

    def sample(self) -> ExampleRef:
        """Return the next example.

        Raises:
            OrchestratorError: the normal pool is empty.
        """
        if self._waiting:
            return self._waiting.popleft()
        # The ratios are fixed at the start: an environment keeps its share as its pool shrinks.
        envs = [env for env, rows in self.pools.normal.items() if rows or env in self._endless]
        if not envs:
            raise OrchestratorError(
                "no example is left to train on, all are easy or hard: raise orchestrator.buffer.easy_threshold, lower "
                "hard_threshold, or raise easy_fraction and hard_fraction"
            )
        number, self._draws = self._draws, self._draws + 1
        draw = random.Random(f"{self.seed}:{number}")
        (env,) = draw.choices(envs, [self._ratios[env] for env in envs])
        example = ExampleRef(env, self._drawn_row(env, draw), number)
        self.ledger.drawn(number, env, example.row, self._fingerprint(example))
        return example

    def _drawn_row(self, env: str, draw: random.Random) -> int:
        if env not in self._next_rows:
            return draw.choice(self.pools.normal[env])
        row = self._next_rows[env]
        if env not in self._endless:
            # The first normal row that has not had its turn, or else the first one of all.
            rows = self.pools.normal[env]
            index = bisect_left(rows, row)
            row = rows[index] if index < len(rows) else rows[0]
        self._next_rows[env] = row + 1
        return row

    def accepts(self, group: Group) -> bool:
        """Whether to train on a finished group. Moves its example to the easy or hard pool if a threshold is reached.

        `online_difficulty_filtering` rejects groups whose rewards are all 0 or all 1. `drop_equal_rewards` rejects
        groups whose rewards are all equal, since their advantages are 0 (dynamic sampling; Yu et al. 2025, DAPO).
        """
        self.counts.groups += 1
        self._evict(group)
        easy, hard = group.every_reward_is(1.0), group.every_reward_is(0.0)
        equal = len(set(group.compared_rewards)) <= 1
        solved_all_or_none = self.config.online_difficulty_filtering and (easy or hard)
        if not solved_all_or_none and not (self.config.drop_equal_rewards and equal):
            return True
        self.counts.easy += easy
        self.counts.hard += hard
        self.counts.equal += not (easy or hard)
        reason = "every reward is 1" if easy else "every reward is 0" if hard else "equal rewards"
        self.ledger.dropped(group.example.draw, reason)
        return False

    def rejections(self) -> str:
        """Number of groups rejected since the last report, with reasons; empty if there are none."""
        reasons = self.counts.by_reason
        if not reasons:
            return ""
        words = ", ".join(f"{count} with {reason}" for reason, count in reasons.items())
        return f"{sum(reasons.values())} of {count_of('group', self.counts.groups)} rejected ({words})"

    def advice(self) -> str:
        """Advice on the rejections since the last report."""
        reason = next(iter(self.counts.by_reason), EQUAL)
        filters = ("online_difficulty_filtering", "drop_equal_rewards")
        keys = " and ".join(f"buffer.{key}" for key in filters if getattr(self.config, key))
        return f"{ADVICE[reason]}, or turn off {keys}"

    def take_metrics(self) -> dict[str, float]:
        """Fractions of the groups finished since the last call, and the current `pool/*` fractions."""
        counts, self.counts = self.counts, GroupCounts()
        finished = max(counts.groups, 1)
        return {
            "filtered_rollouts/easy": counts.easy / finished,
            "filtered_rollouts/hard": counts.hard / finished,
            "filtered_rollouts/equal": counts.equal / finished,
            "evicted_examples/easy": counts.evicted_easy / finished,
            "evicted_examples/hard": counts.evicted_hard / finished,
            **self.pools.shares(),
        }

    def state(self, in_flight: Iterable[ExampleRef]) -> dict[str, Any]:
        """State to resume from. After a resume, the examples in flight are sampled first."""
        waiting = [asdict(example) for example in (*in_flight, *self._waiting)]
        state = {"seed": self.seed, "draws": self._draws, "waiting": waiting, "pools": self.pools.state()}
        return {**state, "next_rows": dict(self._next_rows)} if self._next_rows else state

    @property
    def waiting(self) -> int:
        """Number of examples that `sample` returns before it draws new ones."""
        return len(self._waiting)

    def summary(self) -> dict[str, Any]:
        """The state for the log and the receipt. `seed` and `draws` decide the next draw."""
        waiting = [[example.env, example.row, example.draw] for example in self._waiting]
        position = {"next_rows": dict(self._next_rows)} if self._next_rows else {}
        pools = self.pools.sizes()
        return {"seed": self.seed, "draws": self._draws, **position, "to_draw_again": waiting, "pools": pools}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Drops examples whose environment or row no longer exists.

        Returns `easy_fraction` of the easy pool and `hard_fraction` of the hard pool to the normal pool.
        """
        self.seed = state["seed"]
        self._draws = state["draws"]
        saved = state.get("next_rows", {})
        self._next_rows = {env: saved.get(env, 0) for env in self._next_rows}
        self._waiting.clear()
        for example in (ExampleRef(**each) for each in state["waiting"]):
            count = self.num_rows.get(example.env, 0)
            if count is None or example.row < count:
                self._waiting.append(example)
            else:
                self.ledger.dropped(example.draw, "the dataset no longer has this row")
        self.pools.restore(state["pools"])
        draw = random.Random(f"{self.seed}:{self._draws}:give back")
        self.pools.return_fraction("easy", self.config.easy_fraction, draw)
        self.pools.return_fraction("hard", self.config.hard_fraction, draw)

    def _evict(self, group: Group) -> None:
        easy, hard = self.config.easy_threshold, self.config.hard_threshold
        example = group.example
        if easy is not None and group.mean_reward >= easy:
            self.counts.evicted_easy += self.pools.move(example, "easy")
        elif hard is not None and group.mean_reward <= hard:
            self.counts.evicted_hard += self.pools.move(example, "hard")


@dataclass(slots=True)
class GroupCounts:
    """Numbers of groups since the last report."""

    easy: int = 0
    """Rejected because every reward is 1."""
    hard: int = 0
    """Rejected because every reward is 0."""
    equal: int = 0
    """Rejected because all rewards are equal, but neither 0 nor 1."""
    evicted_easy: int = 0
    evicted_hard: int = 0
    groups: int = 0
    """All finished groups, accepted or rejected."""

    @property
    def by_reason(self) -> dict[str, int]:
        """Number of rejected groups by reason, the most frequent first."""
        counts = {EVERY_0: self.hard, EVERY_1: self.easy, EQUAL: self.equal}
        return {reason: n for reason, n in sorted(counts.items(), key=lambda item: -item[1]) if n}


class DifficultyPools:
    """The rows of every environment in three pools: easy, normal and hard. Only normal examples are sampled.

    The saved state includes fingerprints, so that examples are found again after the dataset has changed.
    """

    def __init__(self, num_rows: Mapping[str, int], fingerprint: Fingerprint) -> None:
        self.normal = {env: list(range(count)) for env, count in num_rows.items()}
        """Row indices in ascending order, so that draws do not depend on the order of moves."""
        self._fingerprint = fingerprint
        self._moved: dict[Difficulty, dict[ExampleRef, str]] = {"easy": {}, "hard": {}}

    def move(self, example: ExampleRef, difficulty: Difficulty) -> bool:
        """Move an example from the normal pool to another; False if it is not in the normal pool."""
        if not self._is_normal(example):
            return False
        rows = self.normal[example.env]
        del rows[bisect_left(rows, example.row)]
        self._moved[difficulty][example] = self._fingerprint(example)
        return True

    def return_fraction(self, difficulty: Difficulty, fraction: float, draw: random.Random) -> None:
        """Return a random fraction of a pool to the normal pool."""
        pool = self._moved[difficulty]
        for example in draw.sample(sorted(pool), round(len(pool) * fraction)):
            del pool[example]
            insort(self.normal[example.env], example.row)

    def sizes(self) -> dict[str, int]:
        """Number of examples in each pool."""
        moved: dict[str, int] = {name: len(pool) for name, pool in self._moved.items()}
        return {"normal": sum(len(rows) for rows in self.normal.values()), **moved}

    def shares(self) -> dict[str, float]:
        """Fraction of all examples in each pool, as `pool/*`."""
        counts = self.sizes()
        return {f"pool/{name}": counts[name] / max(sum(counts.values()), 1) for name in ("easy", "normal", "hard")}

    def state(self) -> dict[str, list[list[Any]]]:
        """`[env, row, fingerprint]` of each easy and hard example."""
        return {
            name: [[example.env, example.row, digest] for example, digest in pool.items()]
            for name, pool in self._moved.items()
        }

    def restore(self, state: Mapping[Difficulty, Sequence[Sequence[Any]]]) -> None:
        """Move the saved examples to their pools. Logs a warning about examples that no longer exist."""
        index: dict[str, dict[str, ExampleRef]] = {}
        for difficulty, entries in state.items():
            found = (self._find(env, row, digest, index) for env, row, digest in entries)
            missing = sum(example is None or not self.move(example, difficulty) for example in found)
            if missing:
                get_logger().warning(
                    f"{missing} of the checkpoint's {len(entries)} {difficulty} examples are no longer in the datasets"
                )

    def _find(self, env: str, row: int, digest: str, index: dict[str, dict[str, ExampleRef]]) -> ExampleRef | None:
        """Find an example at its saved row, or else by its fingerprint. Each environment is indexed at most once."""
        example = ExampleRef(env, row)
        if self._is_normal(example) and self._fingerprint(example) == digest:
            return example
        if env not in index:
            index[env] = {
                self._fingerprint(each): each for each in (ExampleRef(env, row) for row in self.normal.get(env, []))
            }
        return index[env].get(digest)

    def _is_normal(self, example: ExampleRef) -> bool:
        rows = self.normal.get(example.env, [])
        index = bisect_left(rows, example.row)
        return index < len(rows) and rows[index] == example.row


def fingerprint(env: str, row: Mapping[str, Any], keys: Sequence[str]) -> str:
    """SHA-256 of the JSON list of a row's values for `keys`, in hex. `task` is the environment's name.

    Skips keys that the row does not have.
    """
    named = {**row, "task": env}
    text = json.dumps([named[key] for key in keys if key in named], default=str)
    return hashlib.sha256(text.encode()).hexdigest()
