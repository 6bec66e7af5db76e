"""Writes the pass rates of an evaluation as a table, and a curriculum: `python -m prime_rl.eval.passk PLAN`.

PLAN is the JSON of `PassPlan`. Exit status: 0, or 2 with one line for what cannot be done as asked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from prime_rl.environments.rows.curricula import PassRate, write_order, write_pass_rates
from prime_rl.environments.rows.sources import RowsFault
from prime_rl.history.rollouts import KeptRollout, KeptRollouts
from prime_rl.orchestrator.scores import pass_at_k
from prime_rl.run.paths import RunPaths
from prime_rl.utils.logger import count_of
from prime_rl.utils.signals import start_program

_ALMOST = 1e-9
"""Tolerance of the threshold, because rewards are sums of floats."""


@dataclass(frozen=True, slots=True)
class PassPlan:
    """Table and curriculum to make from the results of an evaluation."""

    output_dir: str
    """Directory of the evaluation."""
    table: str
    """File to write: JSON Lines, or CSV if its name ends in `.csv`."""
    threshold: float = 1.0
    """Minimum reward of a correct answer."""
    step: int | None = None
    """Step of the evaluated weights. None if the results have one step only."""
    env: str | None = None
    asked: Mapping[str, tuple[int, int | None, int]] | None = None
    """By environment: first row, end of the rows (None is all), and attempts. Results of an earlier start with more do
    not count. None counts all results."""
    curriculum: str | None = None
    """Text file of prompt ids to write."""
    order: Literal["easy", "hard"] = "easy"
    """Prompts that come first in the curriculum."""
    min_pass_rate: float | None = None
    max_pass_rate: float | None = None


def pass_rates(plan: PassPlan) -> list[PassRate]:
    """The pass rate of each prompt in the results of an evaluation, in the order of the dataset.

    Raises:
        RowsFault: there are no results, or those of several weights and no `step` chooses among them.
    """
    rewards: dict[tuple[str, str], list[float]] = {}
    for env, prompt_id, reward in _rewards(plan):
        rewards.setdefault((env, prompt_id), []).append(reward)
    return [_rate(plan, env, prompt_id, values) for (env, prompt_id), values in rewards.items()]


def ordered(rates: Iterable[PassRate], plan: PassPlan) -> list[str]:
    """Prompt ids of the rates within the plan's band, by rate; those of equal rates stay as they are."""
    low, high = plan.min_pass_rate, plan.max_pass_rate
    kept = [rate for rate in rates if (low is None or rate.rate >= low) and (high is None or rate.rate <= high)]
    kept.sort(key=lambda rate: rate.rate, reverse=plan.order == "easy")
    return list(dict.fromkeys(rate.prompt_id for rate in kept))


def _rewards(plan: PassPlan) -> Iterator[tuple[str, str, float]]:
    """Environment, prompt id and reward of each scored rollout, sorted by environment, row and number."""
    kept = KeptRollouts(RunPaths(Path(plan.output_dir)))
    steps = kept.evaluations()
    if plan.step is None and len(steps) > 1:
        raise RowsFault(
            f"--step: there are results for the weights of several steps ({', '.join(map(str, steps))}): choose one"
        )
    step = plan.step if plan.step is not None else next(iter(steps), None)
    if step not in steps:
        raise RowsFault(f"{kept.results}: no results{'' if step is None else f' of the weights of step {step}'}")
    found = []
    for rollout in kept.of_evaluation(step):
        prompt_id, reward = rollout.fields.get("prompt_id"), rollout.reward
        if not _is_asked(plan, rollout):
            continue
        if (plan.env is None or rollout.env == plan.env) and rollout.error is None and reward is not None:
            if not isinstance(prompt_id, str) or not prompt_id:
                raise RowsFault(
                    f"{kept.results} was written by an earlier version, without prompt ids: choose another --output-dir"
                )
            found.append((rollout.env, rollout.row or 0, rollout.rollout or 0, prompt_id, reward))
    if not found:
        raise RowsFault(f"{kept.results}: no scored rollout" + (f" of environment {plan.env!r}" if plan.env else ""))
    yield from ((env, prompt_id, reward) for env, _, _, prompt_id, reward in sorted(found))


def _is_asked(plan: PassPlan, rollout: KeptRollout) -> bool:
    if plan.asked is None:
        return True
    first, end, attempts = plan.asked.get(rollout.env, (0, 0, 0))
    row = rollout.row or 0
    return row >= first and (end is None or row < end) and (rollout.rollout or 0) < attempts


def _rate(plan: PassPlan, env: str, prompt_id: str, rewards: list[float]) -> PassRate:
    n = len(rewards)
    correct = sum(reward >= plan.threshold - _ALMOST for reward in rewards)
    powers = [2**exponent for exponent in range(n.bit_length())]
    passes = {k: pass_at_k(n, correct, k) for k in powers if k <= n}
    return PassRate(prompt_id, n, correct, env, passes, fmean(rewards))


def write(plan: PassPlan) -> str:
    """Write the table and, if asked, the curriculum. Returns lines that say what was written. Raises RowsFault."""
    rates = pass_rates(plan)
    write_pass_rates(rates, Path(plan.table))
    most = min(rate.n for rate in rates)
    means = [
        f"pass@{k} {fmean((rate.pass_at or {})[k] for rate in rates):.4f}"
        for k in (2**exponent for exponent in range(most.bit_length()))
        if k <= most
    ]
    never = sum(rate.correct == 0 for rate in rates)
    always = sum(rate.correct == rate.n for rate in rates)
    lines = [
        f"{count_of('prompt', len(rates))} in {plan.table}: {', '.join(means)}; {never} never right, {always} always",
    ]
    if len({rate.n for rate in rates}) > 1:
        lines.append(
            f"attempts per prompt differ, from {most} to {max(rate.n for rate in rates)}: rows share a prompt, or "
            "rollouts have no score"
        )
    if plan.curriculum is not None:
        ids = ordered(rates, plan)
        if not ids:
            raise RowsFault(f"no prompt has a pass rate between --min-pass-rate and --max-pass-rate; {lines[0]}")
        write_order(ids, Path(plan.curriculum))
        first = "easy" if plan.order == "easy" else "hard"
        lines.append(f"{count_of('prompt', len(ids))} in {plan.curriculum}, the {first} ones first")
    return "\n".join(lines)


def main() -> None:
    """Write the table, print what it says, and exit."""
    start_program()
    try:
        text = write(PassPlan(**json.loads(sys.argv[1])))
    except (RowsFault, OSError) as fault:
        sys.stderr.write(f"error: {fault}\n")
        raise SystemExit(2) from fault
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
