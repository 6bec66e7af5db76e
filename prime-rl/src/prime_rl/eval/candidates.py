"""What is evaluated: the base model, then checkpoints in the order of their steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prime_rl.eval.errors import MissingSteps
from prime_rl.run.paths import stable_steps

BASE_STEP = 0
"""The step that the base model's results are filed under."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Weights to evaluate."""

    step: int
    weights: Path | None
    """Their directory; None is the base model."""

    def __str__(self) -> str:
        return "base" if self.weights is None else f"step {self.step}"


def find_candidates(eval_base: bool, weights_dir: Path | None, steps: Iterable[int] | None) -> list[Candidate]:
    """The base model, if asked for, and the complete checkpoints in `weights_dir` (of `steps`; None is all).

    Raises:
        MissingSteps: one of `steps` is not there or not complete, or there is nothing to evaluate.
    """
    base = [Candidate(BASE_STEP, None)] if eval_base else []
    if weights_dir is None:
        return base
    complete = stable_steps(weights_dir)
    wanted = complete if steps is None else sorted(set(steps))
    missing = [step for step in wanted if step not in complete]
    if missing or not (wanted or base):
        there = ", ".join(map(str, complete)) or "none"
        lacking = f"step {', '.join(map(str, missing))}" if missing else "any step"
        raise MissingSteps(f"{weights_dir} lacks {lacking}; complete steps: {there}")
    # What a trainer writes before its first step is the base model once more.
    steps_left = [step for step in wanted if not (base and step == BASE_STEP)]
    return [*base, *(Candidate(step, weights_dir / f"step_{step}") for step in steps_left)]
