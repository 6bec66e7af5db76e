"""Computes the scores of an evaluation (avg@n, pass@k, reward functions), and names those that tables show."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.utils.errors import one_line
from prime_rl.utils.logger import count_of

if TYPE_CHECKING:
    # `eval.passk` needs only `pass_at_k`; this module imports verifiers.
    from prime_rl.orchestrator.rollouts.evaluation import Outcome
    from prime_rl.orchestrator.workers.environment import Environment


def eval_metrics(
    outcomes: Sequence[Outcome], rollouts_per_example: int, functions: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Metrics of one environment over its successful rollouts; `failed/*` counts the others.

    Scores are means over examples of the means over their rollouts: an example counts alike if some of its rollouts
    failed, and for rewards of 0 and 1 `avg@n` is `pass@1`. Includes `pass@k` only if every reward is 0 or 1. Lengths
    are in tokens. The means of the reward functions, given with their weights, are `reward_parts/*`, or `metrics/*`
    for those of weight 0.
    """
    rollouts = [rollout for outcome in outcomes for rollout in outcome.rollouts]
    failed = sum(outcome.failed for outcome in outcomes)
    metrics = {"failed/count": failed, "failed/mean": failed / max(len(rollouts) + failed, 1)}
    if not rollouts:
        return metrics
    rewards = _by_example((rollout, rollout.reward) for rollout in rollouts)
    lengths = [rollout.completion_tokens for rollout in rollouts]
    no_response = sum(not has_response(rollout) for rollout in rollouts)
    return {
        f"avg@{rollouts_per_example}": statistics.fmean(map(statistics.fmean, rewards)),
        "no_response/mean": no_response / len(rollouts),
        "no_response/count": no_response,
        "completion_len/mean": statistics.fmean(lengths),
        "completion_len/max": max(lengths),
        "completion_len/min": min(lengths),
        "reward_errors/mean": reward_error_share(rollouts),
        "is_truncated/mean": statistics.fmean(rollout.is_truncated for rollout in rollouts),
        **{f"pass@{k}": value for k, value in pass_at_powers(rewards).items()},
        **_function_means(rollouts, functions or {}),
        **metrics,
    }


def _function_means(rollouts: Sequence[Rollout], functions: Mapping[str, float]) -> dict[str, float]:
    means = {}
    for name, weight in functions.items():
        values = _by_example(
            (rollout, rollout.metrics[name]) for rollout in rollouts if rollout.metrics and name in rollout.metrics
        )
        if values:
            means[f"{'reward_parts' if weight else 'metrics'}/{name}"] = statistics.fmean(map(statistics.fmean, values))
    return means


def _by_example(values: Iterable[tuple[Rollout, float]]) -> list[list[float]]:
    found: dict[ExampleRef, list[float]] = {}
    for rollout, value in values:
        found.setdefault(rollout.example, []).append(value)
    return list(found.values())


def pass_at_powers(rewards: Iterable[Sequence[float]]) -> dict[int, float]:
    """Mean pass@k over examples for k = 1, 2, 4, … up to the smallest number of rollouts of an example.

    Args:
        rewards: The rewards of each example's rollouts. Examples without rollouts are skipped.

    Returns:
        k to pass@k; empty if any reward is neither 0 nor 1, or if there are no rollouts.
    """
    examples = [each for each in rewards if each]
    if not examples or any(reward not in (0.0, 1.0) for each in examples for reward in each):
        return {}
    fewest = min(map(len, examples))
    powers = [2**exponent for exponent in range(fewest.bit_length())]
    return {k: fmean(pass_at_k(len(each), int(sum(each)), k) for each in examples) for k in powers}


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """Unbiased estimate of pass@k, the probability that one of k rollouts solves an example.

    Computed from n = `attempts` rollouts with c = `solved` successes.

    `1 - C(n-c, k) / C(n, k)`: one minus the fraction of k-subsets without a success. Source: Chen et al. 2021,
    "Evaluating Large Language Models Trained on Code", equation 1.

    Raises:
        ValueError: not 0 <= solved <= attempts, or not 1 <= k <= attempts.
    """
    if not 0 <= solved <= attempts or not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} of {attempts} attempts with {solved} solved is not defined")
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def score_titles(metrics: Mapping[str, float]) -> dict[str, str]:
    """Titles of an evaluation's scores, by metric: `avg@n`, `pass@k`, reward functions, functions of weight 0.

    Leaves out a reward function that is the whole reward.
    """
    parts = [name for name in metrics if name.startswith("reward_parts/")]
    names = [
        *(name for name in metrics if name.startswith(("avg@", "pass@"))),
        *(parts if len(parts) > 1 else []),
        *(name for name in metrics if name.startswith("metrics/")),
    ]
    return {name: name.partition("/")[2] or name for name in names}


def has_response(rollout: Rollout) -> bool:
    """Whether any assistant message has text or tool calls."""
    if not isinstance(rollout.completion, list):
        return bool(rollout.completion)
    return any(
        message.get("content") or message.get("tool_calls")
        for message in rollout.completion
        if message.get("role") == "assistant"
    )


def reward_error_share(rollouts: Sequence[Rollout]) -> float:
    """Fraction of rollouts with a reward function that failed. Such rollouts are scored, but not trained on."""
    return statistics.fmean(bool(rollout.reward_errors) for rollout in rollouts)


def zero_line(rollouts: Sequence[Rollout], environment: Environment) -> str | None:
    """A line on why every score is 0, and which reward fits the replies; None if some score is not 0."""
    if not rollouts or any(rollout.reward or rollout.reward_errors for rollout in rollouts):
        return None
    from prime_rl.environments.rewards.fitting import Reply, why_all_zero
    from prime_rl.environments.rewards.text import text_of

    def columns(row: int) -> dict[str, Any]:
        content = environment.content(row) if environment.num_rows is not None else {}
        info = content.get("info")
        info = json.loads(info) if isinstance(info, str) and info.startswith("{") else info
        return {**info, **content} if isinstance(info, Mapping) else content

    replies = [
        Reply(text_of(rollout.completion, "assistant"), columns(rollout.example.row), rollout.is_truncated)
        for rollout in rollouts
    ]
    return why_all_zero(replies, [name for name, weight in environment.reward_functions.items() if weight])


def unscored_line(rollouts: Sequence[Rollout]) -> str | None:
    """A line on the rollouts whose score a failed reward function lowered; None if there are none."""
    failed = [rollout.reward_errors for rollout in rollouts if rollout.reward_errors]
    if not failed:
        return None
    function, trace = next(iter(failed[0].items()))
    reason = one_line((trace.strip().splitlines() or ["no reason"])[-1])
    shares = f"{len(failed)} of {count_of('rollout', len(rollouts))}"
    return f"{shares} had a reward function that failed, which counts as 0; the first: {function}: {reason}"
