from __future__ import annotations

from dataclasses import replace

import pytest

from prime_rl.orchestrator.batches.batch import build_batch, what_is_left_out
from prime_rl.orchestrator.ckpt import Progress
from prime_rl.orchestrator.errors import MalformedRollout, OrchestratorError
from prime_rl.orchestrator.reports.reporter import (
    StepStatus,
    count_tokens,
    environment_metrics,
    log_line,
    progress_metrics,
    reward_metrics,
    rollout_metrics,
    sample_text,
    staleness_metrics,
    status_metrics,
)
from prime_rl.orchestrator.rollouts.replies import VersionSpan
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Group, check_trainable, read_rollout
from prime_rl.orchestrator.rollouts.trace import CallDetails, ModelCall, Prompt
from prime_rl.orchestrator.steps import EmptyBatches

EXAMPLE = ExampleRef("letters", 0)


@pytest.fixture
def batch(turn, rollout):
    """Two groups: rewards 1 and 0, of which the second failed; and rewards 1 and 1 in another environment."""
    first = [rollout(turn([1, 2], [3, 4]), reward=1.0), rollout(turn([1, 2], [3]), reward=0.0, error="ModelError")]
    second = [rollout(turn([1], [2]), reward=1.0, env="numbers", metrics={"exact": float(i)}) for i in range(2)]
    return build_batch([Group(first, off_policy_level=2), Group(second)])


def test_a_batch_ships_only_samples_with_something_to_train(batch) -> None:
    message = batch.message(7)
    assert message.step == 7
    assert [sample.completion_ids for sample in message.examples] == [[3, 4], [2], [2]]
    assert len(batch.rollouts) == 4


def test_tokens_that_are_not_trained_count_as_prefill(batch) -> None:
    counts = count_tokens(sample for _, samples in batch.samples for sample in samples)
    assert (counts.prefill, counts.decode, counts.total) == (2 + 3 + 1 + 1, 2 + 1 + 1, 11)


def test_the_metrics_of_a_step_have_their_documented_names(batch) -> None:
    progress = progress_metrics(batch, Progress(1, 11, 4, 2), policy_version=0)
    assert progress["progress/tokens"] == 11
    assert progress["progress/total_problems"] == 2
    rewards = reward_metrics(batch.groups)
    assert (rewards["reward/mean"], rewards["reward/median"], rewards["reward/min"]) == (0.75, 1.0, 0.0)
    assert (rewards["batch/solve_none"], rewards["batch/solve_all"], rewards["batch/effective_batch_size"]) == (
        0,
        0.5,
        0.5,
    )
    assert (rewards["reward/letters"], rewards["batch/numbers"]) == (0.5, 0.5)
    environment = environment_metrics(batch.rollouts, [])
    assert (environment["error/mean"], environment["error/ModelError"], environment["metrics/exact"]) == (
        0.25,
        1.0,
        0.5,
    )
    lengths = rollout_metrics(batch)
    assert (lengths["seq_len/mean"], lengths["seq_len/max"], lengths["seq_len/min"]) == (2.75, 4, 2)
    assert lengths["samples_per_rollout/mean"] == 1


def test_the_line_of_a_step_is_as_scripts_expect_it(batch) -> None:
    status = StepStatus(4, policy_version=3, groups_in_flight=2, group_size=2, cancelled_groups=1, temperature=1.0)
    metrics = {
        **reward_metrics(batch.groups),
        **rollout_metrics(batch),
        **status_metrics(batch.groups, status),
        "time/step": 1.234,
        "perf/throughput": 8.9,
    }
    assert (metrics["batch/cancelled_rollouts"], metrics["batch/lag/max"]) == (2, 4)
    assert log_line(4, metrics) == (
        "Step 4 | Time: 1.23s | Reward: 0.7500 | Throughput: 8.9 tokens/s | Seq. Length: 2.8 tokens/sample | "
        "Async Level: 1 | Max. Off-Policy Level: 2 | Lag: 4.00 (max. 4)"
    )


def test_the_lag_of_rollouts_is_that_of_their_oldest_token_and_masked_tokens_do_not_count(turn, rollout) -> None:
    """At step 9: four tokens of version 7, two of 8, two without a report; a masked one and a failed rollout of 1."""
    mixed = turn([1], [2, 3, 4, 5, 6, 7])
    spans = (VersionSpan(7, 0, 4), VersionSpan(8, 4, 6))
    masked = replace(turn([1], [2]), completion_mask=[False], details=CallDetails((VersionSpan(1, 0, 1),)))
    rollouts = [rollout(replace(mixed, details=CallDetails(spans))), rollout(turn([1], [2, 3]), masked)]
    failed = rollout(replace(turn([1], [2]), details=CallDetails((VersionSpan(1, 0, 1),))), error="ModelError")
    for each, version in zip([*rollouts, failed], (7, 9, 1), strict=True):
        each.version = version
    metrics = staleness_metrics([Group(rollouts), Group([failed])], step=9)
    assert (metrics["batch/lag/mean"], metrics["batch/lag/max"]) == (pytest.approx((2 + 0 + 8) / 3), 8)
    assert metrics["batch/token_lag/mean"] == (4 * 2 + 2 * 1 + 2 * 0) / 8
    assert metrics["batch/token_lag/max"] == 2


def test_a_sample_reads_as_a_conversation(rollout) -> None:
    attempt = rollout(reward=0.5, stop_condition="max_turns_reached")
    attempt.prompt, attempt.completion = [{"role": "user", "content": "abc"}], [{"role": "assistant", "content": "cba"}]
    assert sample_text(attempt) == "letters row 0, reward 0.5000, max_turns_reached:\n  [user] abc\n  [assistant] cba"


def test_an_empty_batch_says_how_many_rollouts_were_cut_and_by_which_limit(turn, rollout) -> None:
    rollouts = [rollout(turn([1, 2, 3], []), is_truncated=True) for _ in range(3)]
    rollouts += [rollout(error="OverlongPromptError", error_detail="16 tokens"), rollout(turn([1], []))]
    said = what_is_left_out(build_batch([Group(rollouts)]), "orchestrator.seq_len = 3")
    assert said == (
        "of 5 rollouts 1 ended with an error (the first with 16 tokens), 3 were cut off (orchestrator.seq_len = 3), 1 "
        "have no answer"
    )


async def test_empty_batches_wait_longer_each_time_and_end_the_run_at_the_fifth() -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    empty = EmptyBatches(sleep)
    for _ in range(4):
        await empty.pause(3, "of 2 rollouts 2 have no answer")
    with pytest.raises(OrchestratorError, match=r"step 3: 5 batches in a row .* of the last one, of 2 rollouts 2 have"):
        await empty.pause(3, "of 2 rollouts 2 have no answer")
    assert pauses == [30, 60, 120, 240]


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), "high"])
def test_a_reward_that_is_no_number_fails_the_rollout(reward) -> None:
    with pytest.raises(MalformedRollout, match="not a finite number"):
        read_rollout({"reward": reward}, [], EXAMPLE, 1.0, 0)


def test_tokens_and_logprobs_that_do_not_match_fail_the_rollout() -> None:
    with pytest.raises(MalformedRollout, match="2 tokens, 2 mask entries and 1 log-probabilities"):
        ModelCall(Prompt.of([1]), [2, 3], [-1.0], [True, True])
    call = ModelCall(Prompt.of([1]), [2, 3], [-1.0, -1.0], [True, True])
    turns = [{"id": "a", "completion_mask": [True, False, True]}]
    with pytest.raises(MalformedRollout, match="2 tokens and 3 mask entries"):
        read_rollout({"reward": 1.0, "turns": turns}, [("a", call)], EXAMPLE, 1.0, 0)


def test_tokens_that_the_model_does_not_have_fail_the_rollout() -> None:
    recorded = [("a", ModelCall(Prompt.of([1]), [2, 50], [-1.0, -1.0], [True, True]))]
    assert read_rollout({"reward": 1.0}, recorded, EXAMPLE, 1.0, 0, vocab_size=51).trace.completion_tokens == 2
    expected = rf"'{EXAMPLE.env}', row {EXAMPLE.row}: the token id 50, and the model has embeddings for 0\.\.49"
    with pytest.raises(MalformedRollout, match=expected):
        read_rollout({"reward": 1.0}, recorded, EXAMPLE, 1.0, 0, vocab_size=50)


def test_turns_without_tokens_are_left_out() -> None:
    attempt = read_rollout({"reward": 1.0, "turns": [{"id": "not recorded"}]}, [], EXAMPLE, 1.0, 0)
    assert (attempt.trace.calls, attempt.num_turns) == ([], 1)
    with pytest.raises(MalformedRollout, match="no rollout of the group has token ids"):
        check_trainable([attempt])


def test_a_rollout_that_ended_in_an_error_keeps_its_reward_and_does_not_train() -> None:
    error = {"error": "ToolError", "error_chain_repr": "ToolError('x')", "error_chain_str": "ToolError"}
    attempt = read_rollout({"reward": 0.5, "error": error, "turns": []}, [], EXAMPLE, 1.0, 0)
    assert (attempt.reward, attempt.error, attempt.trains) == (0.5, "ToolError", False)
