"""Examples by difficulty: those that have proved too easy or too hard do not come again."""

from __future__ import annotations

import hashlib
import json
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from prime_rl.orchestrator.rollouts.rollout import ExampleRef
from prime_rl.utils.logger import get_logger

Difficulty = Literal["easy", "hard"]
Fingerprint = Callable[[ExampleRef], str]


def fingerprint(env: str, row: Mapping[str, Any], keys: Sequence[str]) -> str:
    """SHA-256 of the values of `keys` in a row, as JSON; `task` is the environment's name, absent keys are skipped."""
    named = {**row, "task": env}
    text = json.dumps([named[key] for key in keys if key in named], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class DifficultyPools:
    """The rows of every environment in three pools: normal, from which examples are drawn, easy and hard.

    What is saved names an example by its fingerprint too, so that it is found again in a dataset that has changed.
    """

    def __init__(self, num_rows: Mapping[str, int], fingerprint: Fingerprint) -> None:
        self.normal = {env: list(range(count)) for env, count in num_rows.items()}
        """Rows in ascending order, so that a draw depends on what has moved and not on when."""
        self._fingerprint = fingerprint
        self._moved: dict[Difficulty, dict[ExampleRef, str]] = {"easy": {}, "hard": {}}

    def move(self, example: ExampleRef, difficulty: Difficulty) -> bool:
        """Take an example out of the normal pool for the rest of the run; False if it was not there."""
        if not self._is_normal(example):
            return False
        rows = self.normal[example.env]
        del rows[bisect_left(rows, example.row)]
        self._moved[difficulty][example] = self._fingerprint(example)
        return True

    def give_back(self, difficulty: Difficulty, fraction: float, draw: random.Random) -> None:
        """Return a share of a pool to the normal one."""
        pool = self._moved[difficulty]
        for example in draw.sample(sorted(pool), round(len(pool) * fraction)):
            del pool[example]
            insort(self.normal[example.env], example.row)

    def shares(self) -> dict[str, float]:
        """`pool/*`: shares of all examples."""
        counts: dict[str, int] = {name: len(pool) for name, pool in self._moved.items()}
        counts["normal"] = sum(len(rows) for rows in self.normal.values())
        return {f"pool/{name}": counts[name] / max(sum(counts.values()), 1) for name in ("easy", "normal", "hard")}

    def state(self) -> dict[str, list[list[Any]]]:
        """`[env, row, fingerprint]` of each example that has moved."""
        return {
            name: [[example.env, example.row, printed] for example, printed in pool.items()]
            for name, pool in self._moved.items()
        }

    def restore(self, state: Mapping[Difficulty, Sequence[Sequence[Any]]]) -> None:
        """Move what had moved. Examples that are gone are left out, with a warning."""
        index: dict[str, dict[str, ExampleRef]] = {}
        for difficulty, entries in state.items():
            found = (self._find(env, row, printed, index) for env, row, printed in entries)
            missing = sum(example is None or not self.move(example, difficulty) for example in found)
            if missing:
                get_logger().warning(
                    f"{missing} of {len(entries)} {difficulty} examples of the checkpoint are not in the datasets now"
                )

    def _find(self, env: str, row: int, printed: str, index: dict[str, dict[str, ExampleRef]]) -> ExampleRef | None:
        """The example where it was or, in a dataset that has changed, wherever it is; that one is indexed once."""
        example = ExampleRef(env, row)
        if self._is_normal(example) and self._fingerprint(example) == printed:
            return example
        if env not in index:
            index[env] = {self._fingerprint(each): each for each in self._examples(env)}
        return index[env].get(printed)

    def _is_normal(self, example: ExampleRef) -> bool:
        rows = self.normal.get(example.env, [])
        index = bisect_left(rows, example.row)
        return index < len(rows) and rows[index] == example.row

    def _examples(self, env: str) -> Iterator[ExampleRef]:
        return (ExampleRef(env, row) for row in self.normal.get(env, []))
