"""Says whether a metric rose or fell over the steps of a run, or did neither."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Literal

Z_LIMIT = 2.58
"""A trend counts if the Mann-Kendall statistic is beyond this: by chance, 1 in 100 series without a trend."""
MIN_VALUES = 6
"""With fewer values, no order of them is beyond `Z_LIMIT`."""
MAX_VALUES = 200
"""Longer series are tested on the means of this many stretches."""
END_SHARE = 0.1
MIN_END_STEPS = 5


@dataclass(frozen=True, slots=True)
class Window:
    """Values of consecutive steps."""

    first_step: int
    last_step: int
    mean: float
    standard_error: float | None
    """Standard error of the mean over the steps. None for a single step."""


@dataclass(frozen=True, slots=True)
class Trend:
    """How a metric changed from the first steps of a run to the last ones."""

    first: Window
    last: Window
    z: float
    """Mann-Kendall statistic of all steps; about standard normal if the values have no trend."""
    count: int
    """Number of finite values."""

    @property
    def change(self) -> float:
        return self.last.mean - self.first.mean

    @property
    def direction(self) -> Literal["rose", "fell", "no trend"]:
        if abs(self.z) < Z_LIMIT:
            return "no trend"
        return "rose" if self.z > 0 else "fell"


def finite(series: Mapping[int, float]) -> dict[int, float]:
    return {step: value for step, value in series.items() if math.isfinite(value)}


def end_steps(count: int) -> int:
    """Number of steps that a mean over the end of a run takes: a tenth, at least 5, at most half."""
    return max(1, min(max(MIN_END_STEPS, round(END_SHARE * count)), count // 2))


def window(series: Mapping[int, float], steps: Sequence[int]) -> Window:
    values = [series[step] for step in steps]
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Window(steps[0], steps[-1], fmean(values), error)


def last_window(series: Mapping[int, float]) -> Window | None:
    """The end of a series; None if it is empty."""
    whole = finite(series)
    steps = sorted(whole)
    return window(whole, steps[-end_steps(len(steps)) :]) if steps else None


def trend(series: Mapping[int, float]) -> Trend | None:
    """None if there are fewer than two finite values."""
    whole = finite(series)
    steps = sorted(whole)
    if len(steps) < 2:
        return None
    count = end_steps(len(steps))
    z = mann_kendall([whole[step] for step in steps])
    return Trend(window(whole, steps[:count]), window(whole, steps[-count:]), z, len(steps))


def mann_kendall(values: Sequence[float]) -> float:
    """The Mann-Kendall statistic of a series, corrected for ties and continuity (Kendall, 1975). 0 for few values."""
    values = _stretch_means(values)
    count = len(values)
    if count < MIN_VALUES:
        return 0.0
    score = sum(
        (later > earlier) - (later < earlier) for place, earlier in enumerate(values) for later in values[place + 1 :]
    )
    ties = [values.count(value) for value in set(values)]
    variance = (count * (count - 1) * (2 * count + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    if score == 0 or variance <= 0:
        return 0.0
    return (score - math.copysign(1, score)) / math.sqrt(variance)


def _stretch_means(values: Sequence[float]) -> list[float]:
    if len(values) <= MAX_VALUES:
        return list(values)
    bounds = [round(place * len(values) / MAX_VALUES) for place in range(MAX_VALUES + 1)]
    return [fmean(values[start:end]) for start, end in pairwise(bounds)]
