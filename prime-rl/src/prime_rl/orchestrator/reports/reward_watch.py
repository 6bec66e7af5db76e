"""Warns when rewards carry no signal, and when one part of the reward falls while the sum rises."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from prime_rl.orchestrator.rollouts.rollout import Group, Rollout

MIN_ROLLOUTS = 32
"""Number of rollouts without a difference in a row that is worth a warning."""
RECOVERY_STEPS = 5
"""Number of good steps in a row that end a stretch of bad ones."""
WINDOW_STEPS = 20
MIN_FALL = 0.1
"""Fall of a part that is worth a warning, as a fraction of its highest mean over a window."""
MIN_STANDARD_ERRORS = 5.0
"""Change between two windows that is not noise, in standard errors of the difference of their means."""
RewardParts = Mapping[str, Mapping[str, float]]
"""Weights of the reward functions that make up the reward, by environment and name."""


def reward_parts(rollouts: Sequence[Rollout], parts: RewardParts) -> dict[str, dict[str, float]]:
    """Mean value of each reward function, by environment and name, over the rollouts that it scored."""
    values: dict[str, dict[str, list[float]]] = {}
    for rollout in rollouts:
        env = rollout.example.env
        for name in parts.get(env, {}):
            if (value := (rollout.metrics or {}).get(name)) is not None:
                values.setdefault(env, {}).setdefault(name, []).append(value)
    return {env: {name: fmean(each) for name, each in of_env.items()} for env, of_env in values.items()}


class RewardWatch:
    """Looks at the rewards of every step."""

    def __init__(self, parts: RewardParts, limits: str = "their length limit") -> None:
        """`limits` names the limits that end an answer early."""
        self.parts = parts
        self._cuts = TruncatedRollouts(limits)
        self._group_size = 0
        self._equal = {env: EqualRewards() for env in parts}
        self._trends = {(env, name): PartTrend() for env, weights in parts.items() for name in weights}

    def observe(self, step: int, groups: Sequence[Group]) -> list[str]:
        """Returns warnings: one at the start of each stretch of steps with the same trouble in one environment."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self._group_size = max((len(group.rollouts) for group in groups), default=0)
        warnings = []
        if (words := self._cuts.observe(rollouts)) is not None:
            warnings.append(f"Step {step}: {words}")
        for env in self.parts:
            of_env = [rollout for rollout in rollouts if rollout.example.env == env]
            prefix = f"environment {env!r}: " if len(self.parts) > 1 else ""
            found = self._observe(step, env, of_env) if of_env else []
            warnings += [f"Step {step}: {prefix}{words}" for words in found]
        return warnings

    def _observe(self, step: int, env: str, rollouts: Sequence[Rollout]) -> Iterator[str]:
        if (words := self._equal[env].observe(step, rollouts)) is not None:
            yield words if self._group_size != 1 else f"{words}; a group has one rollout, compared with nothing"
        reward = fmean(rollout.reward for rollout in rollouts)
        for name, value in reward_parts(rollouts, self.parts).get(env, {}).items():
            weight = self.parts[env][name]
            if (fall := self._trends[env, name].observe(step, weight * value, reward)) is not None:
                yield fall.describe(name, weight)


class Stretch:
    """A stretch of bad steps, which is worth one warning. `RECOVERY_STEPS` good steps in a row end it."""

    def __init__(self) -> None:
        self.has_warned = False
        self._good_steps = 0

    def observe(self, is_good: bool) -> bool:
        """Take the next step. Returns whether it is a bad one of a stretch without a warning so far."""
        self._good_steps = self._good_steps + 1 if is_good else 0
        self.has_warned &= self._good_steps < RECOVERY_STEPS
        return not is_good and not self.has_warned


class TruncatedRollouts:
    """Finds stretches of steps in which most answers are cut off."""

    def __init__(self, limits: str) -> None:
        self._limits = limits
        self._stretch = Stretch()

    def observe(self, rollouts: Sequence[Rollout]) -> str | None:
        """Returns a warning in the first step of a stretch."""
        cut = sum(rollout.is_truncated for rollout in rollouts)
        if not self._stretch.observe(is_good=2 * cut <= len(rollouts)):
            return None
        self._stretch.has_warned = True
        return f"{cut} of {len(rollouts)} rollouts were cut off, so most answers have no end ({self._limits})"


class EqualRewards:
    """Finds stretches of steps in which all rewards are equal, or all advantages 0."""

    def __init__(self) -> None:
        self._rewards: Counter[float] = Counter()
        """Rewards of the stretch so far. Empty once it has been warned of."""
        self._first_step = 0
        self._stretch = Stretch()

    def observe(self, step: int, rollouts: Sequence[Rollout]) -> str | None:
        """Returns a warning once `MIN_ROLLOUTS` in a row do not differ, and one in each stretch."""
        rewards = Counter(rollout.reward for rollout in rollouts)
        is_good = len(rewards) > 1 and any(rollout.advantage for rollout in rollouts)
        if is_good:
            self._rewards.clear()
        if not self._stretch.observe(is_good):
            return None
        if not self._rewards:
            self._first_step = step
        self._rewards += rewards
        if self._rewards.total() < MIN_ROLLOUTS:
            return None
        self._stretch.has_warned = True
        (reward, _), *others = self._rewards.most_common()
        what = "advantages are 0" if others else f"rewards are {reward:g}"
        steps = f"steps {self._first_step} to {step}" if step > self._first_step else "this step"
        warning = (
            f"all {self._rewards.total()} {what} in {steps}: nothing tells good answers from bad ones; "
            "look at the rollouts (orchestrator.save_rollouts) and the reward functions"
        )
        self._rewards.clear()
        return warning


@dataclass(frozen=True, slots=True)
class Window:
    """The last steps in which a part of the reward was measured."""

    steps: tuple[int, ...]
    parts: tuple[float, ...]
    """Contribution of the part to the reward at each step: weight times mean value of its function."""
    rewards: tuple[float, ...]
    """Mean rewards."""

    @property
    def part(self) -> float:
        return fmean(self.parts)

    @property
    def reward(self) -> float:
        return fmean(self.rewards)

    def __str__(self) -> str:
        return f"steps {self.steps[0]} to {self.steps[-1]}"


@dataclass(frozen=True, slots=True)
class Fall:
    """A part of the reward that fell while the reward rose."""

    before: Window
    after: Window

    def describe(self, name: str, weight: float) -> str:
        first, last = self.before.part / weight, self.after.part / weight
        lowers = "" if weight > 0 else f", which lowers the reward (weight {weight:g})"
        verb = "fell" if last < first else "rose"
        return (
            f"reward function {name!r} {verb} from {first:.3f} ({self.before}) to {last:.3f} ({self.after}){lowers}, "
            f"while the reward rose from {self.before.reward:.3f} to {self.after.reward:.3f}"
        )


class PartTrend:
    """Compares each `WINDOW_STEPS` steps of one part of the reward with its best window so far.

    The part has fallen if its mean is lower by `MIN_FALL` or more, the reward's mean is higher, and both differ by more
    than `MIN_STANDARD_ERRORS`. The next fall is looked for only once the part has regained half of what it lost.
    """

    def __init__(self) -> None:
        self._recent: list[tuple[int, float, float]] = []
        self._best: Window | None = None
        self._lowest: float | None = None
        """Lowest mean since the last fall; None if the part has recovered."""

    def observe(self, step: int, part: float, reward: float) -> Fall | None:
        """Take the next step. Returns a fall when a window shows one."""
        self._recent.append((step, part, reward))
        if len(self._recent) < WINDOW_STEPS:
            return None
        now, best = Window(*zip(*self._recent, strict=True)), self._best
        self._recent.clear()
        if best is None or now.part > best.part or self._has_recovered(best, now):
            self._best, self._lowest = now, None
        elif self._lowest is None and _has_fallen(best, now):
            self._lowest = now.part
            return Fall(best, now)
        return None

    def _has_recovered(self, best: Window, now: Window) -> bool:
        if self._lowest is None:
            return False
        self._lowest = min(self._lowest, now.part)
        return now.part >= (best.part + self._lowest) / 2


def _has_fallen(best: Window, now: Window) -> bool:
    is_large = best.part - now.part >= MIN_FALL * abs(best.part)
    return is_large and _is_less(now.parts, best.parts) and _is_less(best.rewards, now.rewards)


def _is_less(values: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the mean of `values` is clearly less than that of `others`."""
    standard_error = math.sqrt(variance(values) / len(values) + variance(others) / len(others))
    return fmean(others) - fmean(values) > MIN_STANDARD_ERRORS * standard_error
