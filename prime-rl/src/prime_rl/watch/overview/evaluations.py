"""Counts the finished rollouts of `eval`, by weights and environment."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_rl.history.metrics import MetricLog
from prime_rl.launch.logs import Follower
from prime_rl.run.paths import EvalPaths
from prime_rl.watch.overview.words import printable


@dataclass(frozen=True, slots=True)
class EvalProgress:
    """One environment with the weights of one step. Step 0 is the base model, if that is evaluated."""

    env: str
    step: int
    done: int
    """Finished rollouts."""
    total: int | None
    """None if the config leaves it to the environment, or asked for more rows than it has."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """`avg@4` and others, once the environment is done."""

    @property
    def weights(self) -> str:
        return "base or step 0" if self.step == 0 else f"step {self.step}"


class EvalTally:
    """Follows `OUT/eval/results.jsonl`. Of each line it keeps no more than the environment and the step."""

    def __init__(self, root: Path) -> None:
        self._lines = Follower(EvalPaths(root).results)
        self._done: Counter[tuple[int, str]] = Counter()

    def progress(self, config: Mapping[str, Any], metrics: MetricLog) -> tuple[EvalProgress, ...]:
        """The progress of every environment that has begun, and of those of the config that have not."""
        for line in self._lines.lines():
            try:
                result = json.loads(line)
                self._done[int(result["step"]), str(result["env"])] += 1
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
        totals = expected_rollouts(config)
        begun = sorted(self._done)
        waiting = [(0, env) for env in totals if not any(env == name for _, name in begun)]
        return tuple(
            _progress(env, step, self._done[step, env], totals.get(env), metrics) for step, env in [*begun, *waiting]
        )


def _progress(env: str, step: int, done: int, total: int | None, metrics: MetricLog) -> EvalProgress:
    found = _reported(metrics, env, step)
    scores = {name: value for name, value in found.items() if name.startswith(("avg@", "pass@"))}
    # An earlier start with more rows has done more. A dataset with fewer is done, and has scores, before the total.
    is_known = total is not None and (total == done + found.get("failed/count", 0) if scores else total >= done)
    return EvalProgress(printable(env), step, done, total if is_known else None, scores)


def expected_rollouts(config: Mapping[str, Any]) -> dict[str, int | None]:
    """Rollouts of each environment with one set of weights. A dataset with fewer rows has fewer."""
    environments = config.get("env", [])
    if not isinstance(environments, Sequence):
        return {}
    counts, repeats = config.get("num_examples"), config.get("rollouts_per_example")
    found: dict[str, int | None] = {}
    for index, env in enumerate(environments):
        if isinstance(env, Mapping):
            rows, each = _item(counts, index), _item(repeats, index)
            name = str(env.get("name") if env.get("name") not in (None, "None") else env.get("id"))
            found[name] = rows * each if rows is not None and each is not None and rows > 0 else None
    return found


def _item(values: Any, index: int) -> int | None:
    """A number for all environments, or the list's own for each."""
    if isinstance(values, list):
        values = values[index] if index < len(values) else values[0] if len(values) == 1 else None
    return values if isinstance(values, int) and not isinstance(values, bool) else None


def _reported(metrics: MetricLog, env: str, step: int) -> dict[str, float]:
    prefix = f"eval/{env}/"
    found = {}
    for source in metrics.sources:
        names = [name for name in metrics.names(source) if name.startswith(prefix)]
        for name, value in metrics.of_step(step, names, source).items():
            found[name.removeprefix(prefix)] = value
    return found
