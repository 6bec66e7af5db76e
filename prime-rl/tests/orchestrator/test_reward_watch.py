"""Warnings about rewards: none without a reason, and one for each stretch."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import verifiers as vf
from datasets import Dataset

from prime_rl.orchestrator.reports.reward_watch import (
    WINDOW_STEPS,
    AnswerLimits,
    EqualRewards,
    PartTrend,
    RewardWatch,
    TruncatedRollouts,
)
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Group, Rollout
from prime_rl.orchestrator.rollouts.trace import CallDetails, ModelCall, Prompt, TokenTrace
from prime_rl.orchestrator.workers.inside.reward_records import reward_functions

Series = Callable[[int, random.Random], tuple[float, float]]
"""Part and reward of a step."""


def rollouts(*rewards: float, advantage: float = 1.0) -> list[Rollout]:
    example = ExampleRef("letters", 0)
    return [Rollout(example, reward, TokenTrace(), 1.0, 0, advantage=advantage) for reward in rewards]


def warned_steps(batches: list[list[Rollout]]) -> list[int]:
    watch = EqualRewards()
    return [step for step, batch in enumerate(batches) if watch.observe(step, batch) is not None]


GOOD, ZERO = rollouts(0.0, 1.0) * 16, rollouts(0.0) * 32


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (ZERO, "all 32 rewards are 0 in this step: they do not show which answers are better"),
        (rollouts(0.25) * 40, "all 40 rewards are 0.25 in this step"),
        (rollouts(0.0, 1.0, advantage=0.0) * 16, "all 32 advantages are 0 in this step"),
    ],
)
def test_rewards_that_tell_nothing_are_warned_of(batch: list[Rollout], words: str) -> None:
    warning = EqualRewards().observe(0, batch)
    assert warning is not None
    assert warning.startswith(words)


def test_groups_of_one_rollout_are_named_as_the_reason() -> None:
    groups = [Group([each]) for each in rollouts(0.0, 1.0, advantage=0.0) * 16]
    (warning,) = RewardWatch({"letters": {}}).observe(0, groups)
    assert warning.endswith("; with one rollout per group, advantages are 0: raise orchestrator.rollouts_per_example")
    assert "one rollout" not in RewardWatch({"letters": {}}).observe(0, [Group(ZERO)])[0]


def test_rewards_of_0_are_explained_where_they_are_warned_of_and_at_the_end() -> None:
    watch = RewardWatch({"letters": {}}, explain=lambda env, rollouts: f"{env}: all {len(rollouts)} scores are 0: why")
    warnings = [watch.observe(step, [Group(ZERO)]) for step in range(3)]
    assert [len(each) for each in warnings] == [2, 0, 0]
    assert warnings[0][1] == "Step 0: letters: all 32 scores are 0: why"
    assert watch.why_zero == {"letters": "letters: all 32 scores are 0: why"}
    assert RewardWatch({"letters": {}}).observe(0, [Group(ZERO)]) == warnings[0][:1]


def test_steps_in_which_most_answers_are_cut_off_are_warned_of_once() -> None:
    whole = rollouts(0.0, 1.0)
    cut = [replace(each, is_truncated=True) for each in whole]
    watch = TruncatedRollouts(AnswerLimits(room="orchestrator.seq_len = 20"))
    warning = watch.observe(cut + whole + cut)
    assert warning == "4 of 6 rollouts were cut off, so most answers have no end (orchestrator.seq_len = 20)"
    others = [watch.observe(batch) for batch in (cut, whole + cut, cut, *[whole] * 5)]
    assert others == [None] * 8
    assert watch.observe(cut) is not None


LIMITS = AnswerLimits(40, 128, "orchestrator.seq_len = 128")


def cut_off(prompt: int, answer: int, finish_reason: str | None = "length") -> Rollout:
    call = ModelCall(
        Prompt.of([1] * prompt), [1] * answer, [-1.0] * answer, [True] * answer, CallDetails((), finish_reason)
    )
    return replace(rollouts(0.0)[0], trace=TokenTrace([call]), is_truncated=True)


@pytest.mark.parametrize(
    ("rollout", "limit"),
    [
        (cut_off(10, 40), "orchestrator.sampling.max_tokens = 40"),
        (cut_off(100, 28), "orchestrator.seq_len = 128"),
        (cut_off(10, 4), "a max_tokens of 4 that environment or agent 'letters' sets itself: raise it there"),
        (cut_off(10, 4, "stop"), "orchestrator.sampling.max_tokens = 40, orchestrator.seq_len = 128"),
    ],
)
def test_the_limit_that_cut_an_answer_off_is_named(rollout: Rollout, limit: str) -> None:
    (warning,) = RewardWatch({}, LIMITS).observe(0, [Group([rollout] * 2)])
    assert warning.endswith(f"so most answers have no end ({limit})")


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([ZERO] * 3, "Nothing was learned: in all 3 steps, every advantage was 0, because all rewards were 0;"),
        ([ZERO] * 3, "no answer was right, or none had the format that the reward functions read"),
        ([[cut_off(10, 4)] * 4] * 2, "100% of the answers were cut off (a max_tokens of 4 that environment"),
        ([rollouts(1.0, 1.0)] * 2, "because all rewards were 1"),
        ([rollouts(0.0, 1.0, advantage=0.0)] * 2, "because the rewards in each group were equal"),
        ([GOOD, ZERO, ZERO], "Little was learned: in 2 of 3 steps, every advantage was 0"),
        ([ZERO], "Read some answers: medarc_train rollouts outputs/run"),
        ([GOOD, GOOD, ZERO], None),
        ([], None),
    ],
)
def test_a_run_that_could_learn_nothing_ends_with_the_reason(batches: list[list[Rollout]], words: str | None) -> None:
    watch = RewardWatch({"letters": {}}, LIMITS)
    for step, batch in enumerate(batches):
        watch.observe(
            step, [Group([replace(each, advantage=each.advantage if batch is GOOD else 0.0)]) for each in batch]
        )
    verdict = watch.lessons.verdict(Path("outputs/run"))
    assert (verdict is None) if words is None else (words in (verdict or ""))


def test_small_batches_are_warned_of_once_32_rollouts_in_a_row_are_equal() -> None:
    small = rollouts(0.0) * 8
    assert warned_steps([small] * 3 + [GOOD] + [small] * 3) == []
    watch = EqualRewards()
    *before, warning = [watch.observe(step, small) for step in range(5, 9)]
    assert before == [None] * 3
    assert warning is not None
    assert "all 32 rewards are 0 in steps 5 to 8" in warning


def test_a_stretch_of_equal_rewards_is_warned_of_once_and_ends_after_five_good_steps() -> None:
    assert warned_steps([ZERO] * 20) == [0]
    assert warned_steps([ZERO, GOOD] * 20) == [0]
    assert warned_steps([ZERO] + [GOOD] * 4 + [ZERO] * 2 + [GOOD] * 5 + [ZERO] * 2) == [0, 12]


def falls(series: Series, num_steps: int, seed: int = 0) -> list[int]:
    draw, trend = random.Random(seed), PartTrend()
    return [step for step in range(num_steps) if trend.observe(step, *series(step, draw)) is not None]


def ramp(step: int, start: int, end: int) -> float:
    """0 until `start`, 1 from `end` on."""
    return min(max((step - start) / (end - start), 0.0), 1.0)


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
def test_a_part_that_falls_while_the_reward_rises_is_found_once(noise: float) -> None:
    def fast(step: int, draw: random.Random) -> tuple[float, float]:
        return 0.9 - 0.5 * ramp(step, 100, 160) + draw.gauss(0, noise), step / 300 + draw.gauss(0, noise)

    def slow(step: int, draw: random.Random) -> tuple[float, float]:
        return 0.9 - 0.5 * ramp(step, 0, 300) + draw.gauss(0, noise), step / 300 + draw.gauss(0, noise)

    (found,) = falls(fast, 300)
    assert 100 < found < 180
    (found,) = falls(slow, 300)
    assert found < 250


def test_a_part_is_watched_again_once_it_has_regained_half_of_what_it_lost() -> None:
    def twice(step: int, draw: random.Random) -> tuple[float, float]:
        lost = 0.4 * ramp(step, 100, 140) - 0.3 * ramp(step, 200, 240) + 0.3 * ramp(step, 300, 340)
        return 0.9 - lost + draw.gauss(0, 0.02), step / 400 + draw.gauss(0, 0.02)

    first, second = falls(twice, 400)
    assert 100 < first < 200
    assert 300 < second < 400


def steady(part: float, noise: float) -> Series:
    return lambda step, draw: (part + draw.gauss(0, noise), 0.3 + step / 2000 + draw.gauss(0, 0.05))


@pytest.mark.parametrize(
    "series",
    [
        pytest.param(steady(0.9, 0.03), id="a steady part"),
        pytest.param(steady(0.1, 0.1), id="a small noisy part"),
        pytest.param(lambda step, draw: (0.9 - 0.05 * ramp(step, 0, 1000), step / 1000), id="a fall of 5%"),
        pytest.param(lambda step, draw: (0.9 - 0.5 * ramp(step, 0, 1000), 1 - step / 1000), id="all fall"),
        pytest.param(lambda step, draw: (0.2 + draw.gauss(0, 0.1), 0.2 + draw.gauss(0, 0.1)), id="noise alone"),
        pytest.param(lambda step, draw: (float(draw.random() < 0.02), step / 1000), id="a rare event"),
        pytest.param(lambda step, draw: (0.5 + step / 2000, step / 1000), id="all rise"),
    ],
)
def test_what_is_not_a_fall_is_not_warned_of(series: Series) -> None:
    """In 20 runs of 1000 steps."""
    assert sum(len(falls(series, 1000, seed)) for seed in range(20)) == 0


def observe_scores(weights: dict[str, float], *windows: dict[str, float]) -> list[str]:
    """Warnings when the functions have each window's values for `WINDOW_STEPS` steps."""
    watch, warnings = RewardWatch({"letters": weights}), []
    for index, values in enumerate(windows):
        reward = sum(weights[name] * value for name, value in values.items())
        for step in range(index * WINDOW_STEPS, (index + 1) * WINDOW_STEPS):
            group = Group(rollouts(reward - 0.1, reward + 0.1))
            for rollout in group.rollouts:
                rollout.metrics = {**values, "num_turns": 1.0}
            warnings += watch.observe(step, [group])
    return warnings


def test_the_warning_names_the_function_its_values_and_the_steps() -> None:
    weights = {"accuracy": 1.0, "layout": 0.5, "length": -0.1}
    (fell,) = observe_scores(
        weights, {"accuracy": 0.2, "layout": 1.0, "length": 0.5}, {"accuracy": 0.9, "layout": 0.6, "length": 0.5}
    )
    assert fell == (
        "Step 39: reward function 'layout' fell from 1.000 (steps 0 to 19) to 0.600 (steps 20 to 39), while the reward "
        "rose from 0.650 to 1.150"
    )
    (rose,) = observe_scores(
        weights, {"accuracy": 0.2, "layout": 1.0, "length": 0.5}, {"accuracy": 0.9, "layout": 1.0, "length": 2.0}
    )
    assert "'length' rose from 0.500 (steps 0 to 19) to 2.000 (steps 20 to 39), which lowers the reward" in rose


def test_an_environment_whose_rewards_are_all_zero_is_named_though_another_one_goes_well() -> None:
    watch = RewardWatch({"letters": {"accuracy": 1.0}, "numbers": {"accuracy": 1.0}})
    well = rollouts(0.0, 1.0) * 16
    for rollout in well:
        rollout.example = ExampleRef("numbers", 0)
    (warning,) = watch.observe(3, [Group(well), Group(ZERO)])
    assert warning.startswith("Step 3: environment 'letters': all 32 rewards are 0 in this step")


def accuracy(completion: Any) -> float:
    return 1.0


def layout(completion: Any) -> float:
    return 1.0


def exact(completion: Any) -> float:
    return 1.0


def test_the_reward_functions_of_every_kind_of_rubric_are_found() -> None:
    plain = vf.Rubric(funcs=[accuracy, exact], weights=[1.0, 0.0])
    group = vf.RubricGroup(rubrics=[plain, vf.Rubric(funcs=[layout], weights=[0.5])])
    rows = Dataset.from_list([{"question": "a", "answer": "a"}])
    alone = vf.SingleTurnEnv(dataset=rows, rubric=plain)
    both = vf.EnvGroup(envs=[alone, vf.SingleTurnEnv(dataset=rows, rubric=group)], env_names=["a", "b"])
    assert reward_functions(plain) == {"accuracy": 1.0, "exact": 0.0}
    assert reward_functions(group) == {"accuracy": 1.0, "exact": 0.0, "layout": 0.5}
    assert reward_functions(alone.rubric) == {"accuracy": 1.0, "exact": 0.0}
    assert reward_functions(both.rubric) == {"accuracy": 1.0, "exact": 0.0, "layout": 0.5}
    assert reward_functions(None) == {}


@pytest.mark.usefixtures("importable_environments")
def test_a_run_that_scores_nothing_is_not_warned_of_rewards_that_are_all_zero(
    orchestrate: Callable[..., tuple[int, str]],
) -> None:
    code, log = orchestrate(batch_size=32, buffer={"skip_verification": True}, advantage=None)
    assert code == 0
    assert "rewards are 0" not in log


@pytest.fixture
def learning(policy_server: Any) -> Iterator[Any]:
    """A policy that answers with one letter at first, and after half of the run with the reversed text."""

    def reply(messages: list[dict[str, Any]], version: int) -> str:
        text = messages[-1]["content"]
        return text[::-1] if len(policy_server.answers) > 4 * WINDOW_STEPS else text[0]

    policy_server.reply = reply
    return policy_server


@pytest.mark.usefixtures("importable_environments", "learning")
def test_a_run_reports_the_parts_of_its_reward_and_warns_of_the_one_that_falls(
    orchestrate: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    """Batches of 4: one letter is short and never right, the reversed text is right and long."""
    code, log = orchestrate(
        env=[{"id": "letters-env", "args": {"kind": "two parts"}}], max_steps=2 * WINDOW_STEPS, max_async_level=100
    )
    assert code == 0
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (records[0]["reward_parts/reversed_text"], records[0]["reward_parts/one_letter"]) == (0.0, 1.0)
    assert (records[-1]["reward_parts/reversed_text"], records[-1]["reward_parts/one_letter"]) == (1.0, 0.0)
    assert "reward_parts/characters" not in records[0]
    *warnings, verdict = re.findall(r"WARNING (.*)", log)
    assert re.match(r"(Nothing|Little) was learned: ", verdict)
    assert [re.match(r"Step (\d+): (all \d+ rewards|reward function '\w+')", line).groups() for line in warnings] == [
        ("7", "all 32 rewards"),
        ("39", "reward function 'one_letter'"),
    ]
