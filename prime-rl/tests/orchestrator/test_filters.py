from __future__ import annotations

import math
from pathlib import Path

import pytest

from prime_rl.configs.orchestrator import GibberishFilterConfig, RepetitionFilterConfig
from prime_rl.orchestrator.batches.batch import apply_filters, setup_filters
from prime_rl.orchestrator.errors import OrchestratorError
from prime_rl.orchestrator.rollouts.rollout import to_samples


def gibberish(model_dir: Path, **fields):
    config = GibberishFilterConfig(type="gibberish", token_id_threshold=100, **fields)
    (made,) = setup_filters([config], str(model_dir))
    return made


def repetition(**fields):
    (made,) = setup_filters([RepetitionFilterConfig(type="repetition", **fields)], "unused")
    return made


def test_gibberish_is_a_late_token_less_likely_than_a_uniform_draw(model_dir, turn, rollout) -> None:
    cutoff = -math.log(128) - 2.0
    detect = gibberish(model_dir).detects
    assert detect(rollout(turn([1], [5]), turn([1], [101], logprob=cutoff - 0.01)))
    assert not detect(rollout(turn([1], [101], logprob=cutoff + 0.01)))
    assert not detect(rollout(turn([1], [100], logprob=cutoff - 0.01)))


def test_repetition_is_a_window_of_certain_tokens_counted_across_turns(turn, rollout) -> None:
    certain, unsure = math.log(0.995), math.log(0.98)
    detect = repetition(window=5).detects
    assert detect(rollout(turn([1], [1, 2, 3], certain), turn([1], [4, 5], certain)))
    assert not detect(rollout(turn([1], [1, 2, 3], certain), turn([1], [9], unsure), turn([1], [4, 5], certain)))


def test_a_token_exactly_at_the_threshold_is_not_certain(turn, rollout) -> None:
    assert not repetition(window=2, prob_threshold=0.5).detects(rollout(turn([1], [1, 2], math.log(0.5))))


def test_the_first_filter_that_detects_wins_and_both_report(model_dir, turn, rollout) -> None:
    filters = [gibberish(model_dir), repetition(window=1, prob_threshold=1e-9)]
    odd, calm = rollout(turn([1], [101], -15.0)), rollout(turn([1], [5], -15.0))
    apply_filters(filters, [odd, calm])
    assert odd.metrics == {"filter/gibberish": 1.0, "filter/repetition": 0.0}
    assert calm.metrics == {"filter/gibberish": 0.0, "filter/repetition": 1.0}
    assert odd.trains
    assert calm.trains


def test_an_enforcing_filter_masks_the_tokens_and_keeps_the_reward(model_dir, turn, rollout) -> None:
    odd = rollout(turn([1], [101], -15.0), reward=1.0)
    apply_filters([gibberish(model_dir, enforce=True)], [odd])
    (sample,) = to_samples(odd)
    assert odd.stop_condition == "gibberish"
    assert sample.completion_mask == [False]
    assert sample.reward == 1.0


def test_a_model_without_a_config_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(OrchestratorError, match="gibberish filter needs the vocabulary size") as fault:
        setup_filters([GibberishFilterConfig(type="gibberish")], str(tmp_path / "missing"))
    assert "\n" not in str(fault.value)
