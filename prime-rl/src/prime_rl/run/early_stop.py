"""Decides by the rules of `[early_stop]` whether a run ends before `max_steps`, and records that it did."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prime_rl.configs.shared import EarlyStopConfig
from prime_rl.utils.files import replacing_file

VAL_LOSS = "val/loss"


@dataclass(slots=True)
class History:
    """What the rules look at, oldest first. Checkpoints hold it, so that a resumed run decides the same."""

    metric: str = VAL_LOSS
    """Metric of the evaluations."""
    higher_is_better: bool = False
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """Step, in optimizer updates, and value of each evaluation."""
    entropies: list[float] = field(default_factory=list)
    """`entropy/mean` of the newest steps, as many as the rules look at."""
    rewards: list[float] = field(default_factory=list)
    """`reward/mean` of the newest steps."""

    def evaluated(self, step: int, value: float) -> None:
        """Add an evaluation. It replaces an earlier one of the same step."""
        self.evaluations = [*(each for each in self.evaluations if each[0] != step), (step, value)]

    def stepped(self, rules: EarlyStopConfig, *, entropy: float | None = None, reward: float | None = None) -> None:
        """Add what a training step reported."""
        if entropy is not None:
            self.entropies = [*self.entropies, entropy][-rules.min_entropy_steps :]
        if reward is not None and rules.constant_reward_steps is not None:
            self.rewards = [*self.rewards, reward][-rules.constant_reward_steps :]

    def best(self) -> tuple[int, float] | None:
        """Step and value of the best evaluation of a trained model; the first one of equals."""
        trained = [each for each in self.evaluations if each[0] > 0 and not math.isnan(each[1])]
        return max(trained, key=lambda each: (self._goodness(each[1]), -each[0]), default=None)

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> History:
        """The history of a checkpoint; an empty one for `{}`, as older checkpoints have none."""
        return cls(**{**saved, "evaluations": [(step, value) for step, value in saved.get("evaluations", [])]})

    def by(self, metric: str, higher_is_better: bool) -> History:
        """This history for evaluations by a metric. Those by another one are dropped."""
        kept = self.evaluations if metric == self.metric else []
        return History(metric, higher_is_better, kept, self.entropies, self.rewards)

    def _goodness(self, value: float) -> float:
        return value if self.higher_is_better else -value

    def why_to_end(self, rules: EarlyStopConfig | None) -> str | None:
        """The rule that ends the run now, in words. None: the run continues."""
        if rules is None:
            return None
        return self._at_target(rules) or self._out_of_patience(rules) or self._collapsed(rules)

    def _at_target(self, rules: EarlyStopConfig) -> str | None:
        if rules.target is None:
            return None
        goal = self._goodness(rules.target)
        for step, value in self.evaluations:
            # The model that the run starts from may be as good, and the run is to train it nevertheless.
            if step > 0 and self._goodness(value) >= goal:
                return f"{self.metric} is {value:.4g} at step {step} (target = {rules.target:g})"
        return None

    def _out_of_patience(self, rules: EarlyStopConfig) -> str | None:
        if rules.patience is None:
            return None
        best_step, best, since = 0, math.nan, 0
        for step, value in self.evaluations:
            # A NaN is never better, and anything is better than it.
            if self._goodness(value) > self._goodness(best) + rules.min_delta or (
                math.isnan(best) and not math.isnan(value)
            ):
                best_step, best, since = step, value, 0
            else:
                since += 1
        if since < rules.patience:
            return None
        return (
            f"{self.metric} did not improve in {since} evaluations: the best is {best:.4g} at step {best_step} "
            f"(patience = {rules.patience})"
        )

    def _collapsed(self, rules: EarlyStopConfig) -> str | None:
        steps = rules.min_entropy_steps
        newest = self.entropies[-steps:]
        if rules.min_entropy is not None and len(newest) == steps and max(newest) < rules.min_entropy:
            return (
                f"entropy/mean was below {rules.min_entropy:g} in {steps} steps in a row, {newest[-1]:.4g} in the last "
                "(min_entropy)"
            )
        if (count := rules.constant_reward_steps) is None:
            return None
        rewards = self.rewards[-count:]
        if len(rewards) == count and len(set(rewards)) == 1:
            return f"reward/mean was {rewards[0]:.4g} in {count} steps in a row (constant_reward_steps)"
        return None


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """The early end of a run, `OUT/early_end.json`."""

    step: int
    """Optimizer updates of the run."""
    why: str
    history: History

    @classmethod
    def read(cls, path: Path) -> EarlyEnd | None:
        """None if the run did not end early, or if the file is damaged."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            return cls(int(record["step"]), str(record["why"]), History.of(record["history"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        with replacing_file(path) as scratch:
            scratch.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


# The best step of an RL run: the orchestrator records it, the trainer keeps its checkpoint.


def record_best(history: History, path: Path) -> None:
    """Write step and value of the best evaluation, or remove the record of another run if there is none."""
    best = history.best()
    if best is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(path) as scratch:
        record = {"step": best[0], "metric": history.metric, "value": best[1]}
        scratch.write_text(json.dumps(record) + "\n", encoding="utf-8")


def recorded_best(path: Path) -> int | None:
    """The recorded step. None if there is no record, or if it is damaged."""
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
