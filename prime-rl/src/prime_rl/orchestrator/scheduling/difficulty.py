"""Difficulty pools: examples that are too easy or too hard are not sampled again."""

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
    """SHA-256 of the JSON list of a row's values for `keys`, in hex. `task` is the environment's name.

    Skips keys that the row does not have.
    """
    named = {**row, "task": env}
    text = json.dumps([named[key] for key in keys if key in named], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


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
            index[env] = {self._fingerprint(each): each for each in self._examples(env)}
        return index[env].get(digest)

    def _is_normal(self, example: ExampleRef) -> bool:
        rows = self.normal.get(example.env, [])
        index = bisect_left(rows, example.row)
        return index < len(rows) and rows[index] == example.row

    def _examples(self, env: str) -> Iterator[ExampleRef]:
        return (ExampleRef(env, row) for row in self.normal.get(env, []))
