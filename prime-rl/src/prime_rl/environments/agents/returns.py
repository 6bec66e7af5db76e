"""Rewards of an agent's model calls, and what each call is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

MAX_REWARD = 1e15
"""The square of a larger one overflows float32, in which the trainer computes."""


class InvalidReward(ValueError):
    """What was given as a reward is none. The message is one line."""


def checked_reward(value: Any) -> float:
    """A reward as a float: any real number, also of NumPy, and booleans.

    Raises:
        InvalidReward: it is not a finite number of at most 1e15.
    """
    try:
        number = float(value if isinstance(value, Real) else _plain_number(value))
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not abs(number) <= MAX_REWARD:
        shown = " ".join(repr(value).split())[:100]
        raise InvalidReward(f"the reward {shown} is not a finite number (at most {MAX_REWARD:g})")
    return number


def _plain_number(value: Any) -> Any:
    """What a tensor or array of one number holds; NaN for texts and everything else."""
    item = getattr(value, "item", None)
    if isinstance(value, str | bytes) or not callable(item):
        return math.nan
    try:
        return item()
    except (RuntimeError, TypeError, ValueError):
        return math.nan


def discounted(rewards: Sequence[float | None], discount: float) -> list[float]:
    """Returns of calls in the order of their answers: R_i = r_i + discount * R_(i+1). A call without reward has 0."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = (reward or 0.0) + discount * following
        returns.append(following)
    return returns[::-1]


def call_rewards(rewards: Sequence[float | None], discount: float) -> list[float] | None:
    """What each call of a rollout is worth; None if all calls share the rollout's reward.

    They share it if only the last call has a reward, and the discount is 1.
    """
    if len(rewards) < 2 or (discount == 1 and not any(rewards[:-1])):
        return None
    return discounted(rewards, discount)
