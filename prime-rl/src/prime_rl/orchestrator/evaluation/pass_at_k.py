"""Computes pass@k: the probability that at least one of k attempts solves an example."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """Unbiased estimate of pass@k for one example, from n = `attempts` attempts with c = `solved` successes.

    `1 - C(n-c, k) / C(n, k)`: one minus the fraction of k-subsets without a success. Source: Chen et al. 2021,
    "Evaluating Large Language Models Trained on Code", equation 1.

    Raises:
        ValueError: not 0 <= solved <= attempts, or not 1 <= k <= attempts.
    """
    if not 0 <= solved <= attempts or not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} of {attempts} attempts with {solved} solved is not defined")
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def pass_at_powers(rewards: Iterable[Sequence[float]]) -> dict[int, float]:
    """Mean pass@k over examples for k = 1, 2, 4, … up to the smallest number of attempts at an example.

    Args:
        rewards: The rewards of each example's attempts. Examples without attempts are skipped.

    Returns:
        k to pass@k; empty if any reward is neither 0 nor 1, or if there are no attempts.
    """
    examples = [each for each in rewards if each]
    if not examples or any(reward not in (0.0, 1.0) for each in examples for reward in each):
        return {}
    fewest = min(map(len, examples))
    powers = [2**exponent for exponent in range(fewest.bit_length())]
    return {k: fmean(pass_at_k(len(each), int(sum(each)), k) for each in examples) for k in powers}
