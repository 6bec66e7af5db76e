"""A trend is what chance hardly makes: the statistic has the moments of all orders of its values."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean, pvariance

import pytest

from prime_rl.history.metrics import MIN_VALUES, Z_LIMIT, end_steps, last_window, mann_kendall, trend


def score(values: tuple[float, ...]) -> int:
    return sum((b > a) - (b < a) for a, b in itertools.combinations(values, 2))


@pytest.mark.parametrize("values", [(1, 2, 3, 4, 5, 6, 7), (1, 1, 2, 3, 3, 3, 4), (0, 0, 0, 1, 1, 2)])
def test_it_is_the_score_over_its_deviation_among_all_orders(values: tuple[int, ...]) -> None:
    """The reference counts every permutation."""
    scores = [score(order) for order in itertools.permutations(values)]
    assert fmean(scores) == pytest.approx(0)
    for order in (values, values[::-1], values[3:] + values[:3]):
        own = score(order)
        expected = (own - math.copysign(1, own)) / math.sqrt(pvariance(scores)) if own else 0.0
        assert mann_kendall(order) == pytest.approx(expected)


def test_noise_has_a_trend_in_about_one_of_a_hundred_runs() -> None:
    chance = random.Random(1)
    beyond = sum(abs(mann_kendall([chance.gauss(0, 1) for _ in range(40)])) > Z_LIMIT for _ in range(2000))
    assert 5 <= beyond <= 40


def test_six_values_in_order_are_a_trend_and_five_are_not() -> None:
    assert mann_kendall(range(MIN_VALUES)) > Z_LIMIT
    assert mann_kendall(range(MIN_VALUES - 1)) == 0.0
    assert mann_kendall([3.0] * 50) == 0.0


def test_a_long_series_is_tested_on_means() -> None:
    assert mann_kendall([step + 500 * (step % 2) for step in range(100_000)]) > 20


def test_ends_are_a_tenth_of_the_steps_and_leave_out_what_is_not_finite() -> None:
    series = {step: float(step) for step in range(100)} | {99: math.nan, 98: math.inf}
    found = trend(series)
    assert found is not None
    assert (found.first.mean, found.last.mean, found.direction) == (4.5, 92.5, "rose")
    assert (found.last.first_step, found.last.last_step) == (88, 97)
    assert [end_steps(count) for count in (1, 2, 8, 30, 100)] == [1, 1, 4, 5, 10]


def test_too_few_values_have_no_trend() -> None:
    assert trend({}) is None
    assert trend({3: 1.0, 4: math.nan}) is None
    assert last_window({}) is None
    only = last_window({3: 1.0})
    assert only is not None
    assert (only.mean, only.standard_error) == (1.0, None)
