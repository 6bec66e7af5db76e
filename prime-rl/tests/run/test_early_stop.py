"""The rules of `[early_stop]`: when they end a run, and what a checkpoint keeps of what they look at."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.shared import EarlyStopConfig
from prime_rl.run.early_stop import EarlyEnd, History, record_best, recorded_best
from prime_rl.utils.pydantic_config import ConfigError, load_config

LOSS, SCORE = ("val/loss", False), ("eval/letters/avg@4", True)
NAN = math.nan


def history(metric: tuple[str, bool], *values: float, every: int = 10) -> History:
    """Evaluations of steps 0, 10, 20, …"""
    made = History(*metric)
    for place, value in enumerate(values):
        made.evaluated(place * every, value)
    return made


@pytest.mark.parametrize(
    ("rules", "metric", "values", "why"),
    [
        ({"patience": 2}, LOSS, [], None),
        ({"patience": 2}, LOSS, [3.0, 2.0, 2.5], None),
        (
            {"patience": 2},
            LOSS,
            [3.0, 2.0, 2.5, 2.0],
            "val/loss did not improve in 2 evaluations: the best is 2 at step 10 (patience = 2)",
        ),
        ({"patience": 2}, LOSS, [3.0, 2.0, 2.5, 1.9, 2.0], None),
        # The model that the run starts from counts, too.
        ({"patience": 2}, LOSS, [1.0, 2.0, 3.0], "the best is 1 at step 0"),
        ({"patience": 2}, SCORE, [0.5, 0.4, 0.3], "did not improve in 2 evaluations: the best is 0.5 at step 0"),
        ({"patience": 2}, SCORE, [0.3, 0.4, 0.5], None),
        ({"patience": 2, "min_delta": 0.1}, SCORE, [0.3, 0.38, 0.39], "the best is 0.3 at step 0"),
        # Small gains add up, as they are compared with the best and not with the last one.
        ({"patience": 2, "min_delta": 0.1}, SCORE, [0.3, 0.38, 0.45], None),
        ({"patience": 2}, LOSS, [3.0, NAN, NAN], "the best is 3 at step 0"),
        ({"patience": 2}, LOSS, [NAN, 3.0, NAN], None),
        ({"target": 2.0}, LOSS, [3.0, 2.1], None),
        ({"target": 2.0}, LOSS, [3.0, 2.0], "val/loss is 2 at step 10 (target = 2)"),
        ({"target": 0.9}, SCORE, [0.1, 0.95], "eval/letters/avg@4 is 0.95 at step 10 (target = 0.9)"),
        # A run is to train, even if it starts from a model that is good enough.
        ({"target": 0.9}, SCORE, [0.95, 0.8], None),
        ({"target": 0.9, "patience": 1}, SCORE, [0.5, 0.95, 0.9], "target"),
        (None, LOSS, [1.0, 2.0, 3.0], None),
    ],
)
def test_evaluations_end_a_run(
    rules: dict[str, Any] | None, metric: tuple[str, bool], values: list[float], why: str | None
) -> None:
    found = history(metric, *values).why_to_end(None if rules is None else EarlyStopConfig(**rules))
    assert found is None if why is None else why in (found or "")


@pytest.mark.parametrize(
    ("rules", "entropies", "rewards", "why"),
    [
        ({"min_entropy": 0.1, "min_entropy_steps": 3}, [0.5, 0.05, 0.04], [], None),
        (
            {"min_entropy": 0.1, "min_entropy_steps": 3},
            [0.5, 0.05, 0.04, 0.03],
            [],
            "entropy/mean was below 0.1 in 3 steps in a row, 0.03 in the last (min_entropy)",
        ),
        ({"min_entropy": 0.1, "min_entropy_steps": 3}, [0.05, 0.1, 0.04, 0.03], [], None),
        ({"constant_reward_steps": 3}, [], [0.0, 0.0], None),
        ({"constant_reward_steps": 3}, [], [1.0, 0.5, 0.5, 0.5], "reward/mean was 0.5 in 3 steps in a row"),
        ({"constant_reward_steps": 3}, [], [0.5, 0.5, 0.6], None),
        ({"constant_reward_steps": 3}, [0.0] * 20, [], None),
    ],
)
def test_a_collapse_ends_a_run(
    rules: dict[str, Any], entropies: list[float], rewards: list[float], why: str | None
) -> None:
    config, made = EarlyStopConfig(**rules), History(*SCORE)
    for entropy in entropies:
        made.stepped(config, entropy=entropy)
    for reward in rewards:
        made.stepped(config, reward=reward)
    found = made.why_to_end(config)
    assert found is None if why is None else why in (found or "")


def test_a_history_survives_a_checkpoint_and_is_decided_by_the_rules_of_today() -> None:
    rules = EarlyStopConfig(patience=2, min_entropy=0.1, min_entropy_steps=2, constant_reward_steps=2)
    made = history(SCORE, 0.5, 0.4, 0.3)
    made.stepped(rules, entropy=0.05, reward=0.25)
    made.stepped(rules, entropy=0.04, reward=0.5)
    made.stepped(rules, entropy=0.03, reward=0.75)
    saved = json.loads(json.dumps(asdict(made)))
    again = History.of(saved).by(*SCORE)
    assert again == made
    assert (again.entropies, again.rewards) == ([0.04, 0.03], [0.5, 0.75])
    assert again.why_to_end(rules) == made.why_to_end(rules) is not None
    assert again.why_to_end(EarlyStopConfig(patience=3)) is None
    other = History.of(saved).by("eval/letters/pass@1", True)
    assert (other.evaluations, other.entropies) == ([], [0.04, 0.03])
    assert History.of({}) == History()


def test_the_best_step_is_a_trained_one_and_the_first_of_equals(tmp_path: Path) -> None:
    file = tmp_path / "checkpoints" / "best.json"
    record_best(history(SCORE, 0.9), file)
    assert recorded_best(file) is None
    record_best(history(SCORE, 0.9, 0.5, NAN, 0.5), file)
    assert json.loads(file.read_text()) == {"step": 10, "metric": "eval/letters/avg@4", "value": 0.5}
    assert recorded_best(file) == 10
    record_best(history(LOSS, 1.0, 0.5, 0.4), file)
    assert recorded_best(file) == 20
    record_best(History(*LOSS), file)
    assert not file.exists()
    file.write_text("{")
    assert recorded_best(file) is None


def test_an_evaluation_that_is_made_again_counts_once() -> None:
    made = history(SCORE, 0.9, 0.5)
    made.evaluated(10, 0.6)
    assert made.evaluations == [(0, 0.9), (10, 0.6)]


def test_the_record_of_an_early_end_is_read_as_written_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    file = tmp_path / "early_end.json"
    assert EarlyEnd.read(file) is None
    end = EarlyEnd(20, "enough", history(SCORE, 0.5, 0.9))
    end.write(file)
    assert EarlyEnd.read(file) == end
    for damaged in ("", "[]", '{"step": 1, "why": "x"}', '{"step": 1, "why": "x", "history": {"other": 1}}'):
        file.write_text(damaged)
        assert EarlyEnd.read(file) is None


def test_a_table_without_a_rule_is_refused() -> None:
    from prime_rl.configs.sft import SFTConfig

    with pytest.raises(ConfigError, match="has no rule: set patience"):
        load_config(SFTConfig, [], {"early_stop": {"min_delta": 0.1}, "val": {}})
