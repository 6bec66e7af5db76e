"""pass@k by the unbiased estimator."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import pytest

from prime_rl.orchestrator.scores import pass_at_k, pass_at_powers


def test_one_success_in_four() -> None:
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]


@pytest.mark.parametrize("solved", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_it_is_the_mean_over_all_choices_of_k_attempts(solved: int, k: int) -> None:
    attempts = [True] * solved + [False] * (5 - solved)
    assert pass_at_k(5, solved, k) == pytest.approx(fmean(any(chosen) for chosen in combinations(attempts, k)))


def test_more_attempts_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="pass@3 of 2 attempts"):
        pass_at_k(2, 1, 3)


def test_powers_of_two_are_averaged_over_examples() -> None:
    assert pass_at_powers([[1.0, 0.0, 0.0, 0.0], [0.0] * 4]) == {1: 0.125, 2: 0.25, 4: 0.5}


def test_the_fewest_attempts_bound_k() -> None:
    assert list(pass_at_powers([[1.0] * 7, [0.0, 1.0, 1.0]])) == [1, 2]


def test_partial_rewards_have_no_pass_rate() -> None:
    assert pass_at_powers([[1.0, 0.5], [0.0, 1.0]]) == {}
    assert pass_at_powers([]) == {}
