"""Warns when rewards carry no signal, and when one part of the reward falls while the sum rises."""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, variance

from prime_rl.orchestrator.rollouts.rollout import Group, Rollout

MIN_ROLLOUTS = 32
"""Number of rollouts without a difference in a row that is worth a warning."""
RECOVERY_STEPS = 5
"""Number of good steps in a row that end a stretch of bad ones."""
NOTHING_LEARNED, LITTLE_LEARNED = "Nothing was learned", "Little was learned"
"""First words of the last line of a run without advantages, which the launcher repeats at its end."""
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


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """The limits of this run that end an answer early."""

    max_tokens: int | None = None
    """`orchestrator.sampling.max_tokens`."""
    room_tokens: int = sys.maxsize
    """Longest prompt with its answer."""
    room: str = "their length limit"
    """What sets `room_tokens`, for messages."""

    def __str__(self) -> str:
        own = [] if self.max_tokens is None else [f"orchestrator.sampling.max_tokens = {self.max_tokens}"]
        return ", ".join([*own, self.room])

    def which(self, rollout: Rollout) -> str:
        """The limit that cut a rollout off. Both of ours, if its calls do not tell."""
        call = next((call for call in reversed(rollout.trace.calls) if call.details.finish_reason == "length"), None)
        if call is None:
            return str(self)
        count = len(call.completion_ids)
        if self.max_tokens is not None and count >= self.max_tokens:
            return f"orchestrator.sampling.max_tokens = {self.max_tokens}"
        if len(call.prompt_ids) + count >= self.room_tokens - 1:
            return self.room
        env = rollout.example.env
        return f"a max_tokens of {count} that environment or agent {env!r} sets itself: raise it there"


Explain = Callable[[str, Sequence[Rollout]], str | None]
"""Says why all rewards of an environment's rollouts are 0. None if they are not."""


class RewardWatch:
    """Looks at the rewards of every step."""

    def __init__(
        self, parts: RewardParts, limits: AnswerLimits = AnswerLimits(), explain: Explain = lambda env, rollouts: None
    ) -> None:
        self.parts = parts
        self.why_zero: dict[str, str] = {}
        """Why all rewards of an environment were 0, as the last warning had it."""
        self._explain = explain
        self.lessons = Lessons(limits)
        self._cuts = TruncatedRollouts(limits)
        self._group_size = 0
        self._equal = {env: EqualRewards() for env in parts}
        self._trends = {(env, name): PartTrend() for env, weights in parts.items() for name in weights}

    def observe(self, step: int, groups: Sequence[Group]) -> list[str]:
        """Returns warnings: one at the start of each stretch of steps with the same trouble in one environment."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self.lessons.observe(rollouts, reward_parts(rollouts, self.parts))
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
            yield (
                words
                if self._group_size != 1
                else f"{words}; with one rollout per group, advantages are 0: raise orchestrator.rollouts_per_example"
            )
            if (why := self._explain(env, rollouts)) is not None:
                self.why_zero[env] = why
                yield why
        reward = fmean(rollout.reward for rollout in rollouts)
        for name, value in reward_parts(rollouts, self.parts).get(env, {}).items():
            weight = self.parts[env][name]
            if (fall := self._trends[env, name].observe(step, weight * value, reward)) is not None:
                yield fall.describe(name, weight)


@dataclass(slots=True)
class Lessons:
    """Counts the steps that could teach the policy anything, for the last line of a run that could not."""

    limits: AnswerLimits
    steps: int = 0
    taught: int = 0
    """Steps in which a rollout had an advantage other than 0."""
    rollouts: int = 0
    silent: int = 0
    """Rollouts without a token that could be trained on."""
    cut: Counter[str] = field(default_factory=Counter)
    """Rollouts that were cut off, by the limit."""
    rewards: set[float] = field(default_factory=set)
    """Some of the different rewards: two are enough to tell that they differ."""
    part_sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sum over steps of the mean of each reward function."""
    part_steps: Counter[str] = field(default_factory=Counter)

    def observe(self, rollouts: Sequence[Rollout], parts: Mapping[str, Mapping[str, float]]) -> None:
        self.steps += 1
        self.taught += any(
            rollout.trains and (rollout.advantage or any(rollout.call_advantages or ())) for rollout in rollouts
        )
        self.rollouts += len(rollouts)
        self.silent += sum(not rollout.trains for rollout in rollouts)
        self.cut.update(self.limits.which(rollout) for rollout in rollouts if rollout.is_truncated)
        for rollout in rollouts:
            if len(self.rewards) < 2:
                self.rewards.add(rollout.reward)
        for name, value in ((name, value) for each in parts.values() for name, value in each.items()):
            self.part_sums[name] += value
            self.part_steps[name] += 1

    def verdict(self, run: Path) -> str | None:
        """One line if no step taught anything, or most of them did not; otherwise None."""
        if 2 * self.taught >= self.steps:
            return None
        what = (
            f"{NOTHING_LEARNED}: in all {self.steps} steps, every advantage was 0"
            if not self.taught
            else f"{LITTLE_LEARNED}: in {self.steps - self.taught} of {self.steps} steps, every advantage was 0"
        )
        return f"{what}, because {'; '.join(self._reasons())}. Read some answers: medarc_train rollouts {run}"

    def _reasons(self) -> Iterator[str]:
        if len(self.rewards) == 1:
            yield f"all rewards were {next(iter(self.rewards)):g}"
        else:
            yield "the rewards in each group were equal"
        cut = self.cut.total()
        if 10 * cut >= self.rollouts:
            yield f"{cut / self.rollouts:.0%} of the answers were cut off ({self.cut.most_common(1)[0][0]})"
        if 10 * self.silent >= self.rollouts:
            yield f"{self.silent / self.rollouts:.0%} of the rollouts failed or were filtered out"
        means = {name: total / self.part_steps[name] for name, total in self.part_sums.items()}
        if len(means) > 1:
            yield "the means of the reward functions were " + ", ".join(f"{k} {v:.3g}" for k, v in means.items())
        if not any(means.values()) and 10 * cut < self.rollouts:
            yield "no answer was right, or none had the format that the reward functions read"


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

    def __init__(self, limits: AnswerLimits) -> None:
        self._limits = limits
        self._stretch = Stretch()

    def observe(self, rollouts: Sequence[Rollout]) -> str | None:
        """Returns a warning in the first step of a stretch."""
        cut = [rollout for rollout in rollouts if rollout.is_truncated]
        if not self._stretch.observe(is_good=2 * len(cut) <= len(rollouts)):
            return None
        self._stretch.has_warned = True
        limit = Counter(map(self._limits.which, cut)).most_common(1)[0][0]
        return f"{len(cut)} of {len(rollouts)} rollouts were cut off, so most answers have no end ({limit})"


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
            f"all {self._rewards.total()} {what} in {steps}: they do not show which answers are better; "
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
