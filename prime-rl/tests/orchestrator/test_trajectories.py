from __future__ import annotations

from dataclasses import replace

from prime_rl.orchestrator.rollouts.rollout import to_samples
from prime_rl.transport.messages import ImageReference


def test_a_single_turn_is_one_sample_with_its_tokens_masks_and_temperature(turn, rollout) -> None:
    attempt = rollout(turn([1, 2], [3, 4], logprob=-0.25), reward=0.5)
    attempt.advantage, attempt.temperature = 0.75, 0.9
    (sample,) = to_samples(attempt)
    assert (sample.prompt_ids, sample.prompt_mask) == ([1, 2], [False, False])
    assert (sample.completion_ids, sample.completion_mask) == ([3, 4], [True, True])
    assert sample.inference_logprobs == [-0.25, -0.25]
    assert sample.completion_temperatures == [0.9, 0.9]
    assert (sample.advantage, sample.reward) == (0.75, 0.5)


def test_a_turn_that_continues_another_joins_it_and_leaves_the_environments_tokens_untrained(turn, rollout) -> None:
    first, second = turn([1, 2], [3]), turn([1, 2, 3, 8, 9], [4, 5], logprob=-2.0)
    (sample,) = to_samples(rollout(first, second))
    assert sample.prompt_ids == [1, 2]
    assert sample.completion_ids == [3, 8, 9, 4, 5]
    assert sample.completion_mask == [True, False, False, True, True]
    assert sample.inference_logprobs == [-1.0, 0.0, 0.0, -2.0, -2.0]
    assert len(sample.completion_temperatures) == 5


def test_a_turn_after_another_image_of_the_same_size_joins_nothing(turn, rollout) -> None:
    def shown(call, *names):
        return replace(call, images=tuple(ImageReference(name, f"/{name}.png", 8, 8) for name in names))

    first, second, other = turn([1, 2], [3]), turn([1, 2, 3, 4], [5]), turn([1, 2, 3, 4], [6])
    samples = to_samples(rollout(shown(first, "a"), shown(second, "a", "b"), shown(other, "c")))
    assert [sample.images for sample in samples] == [["a", "b"], ["c"]]
    assert [sample.completion_ids for sample in samples] == [[3, 4, 5], [6]]


def test_agents_that_take_turns_get_a_sample_each(turn, rollout) -> None:
    a1, a2 = turn([1], [2]), turn([1, 2, 3], [4])
    b1 = turn([7], [8])
    a3 = turn([1, 2, 3, 4, 5], [6])
    samples = to_samples(rollout(a1, a2, b1, a3))
    assert [sample.prompt_ids for sample in samples] == [[1], [7]]
    assert samples[0].completion_ids == [2, 3, 4, 5, 6]
    assert samples[0].completion_mask == [True, False, True, False, True]
    assert samples[1].completion_ids == [8]


def test_a_template_that_rewrites_history_opens_a_sample_a_turn(turn, rollout) -> None:
    samples = to_samples(rollout(turn([1, 2], [3]), turn([1, 9, 3, 4], [5]), turn([1, 9, 9], [6])))
    assert [sample.completion_ids for sample in samples] == [[3], [5], [6]]


def test_the_first_line_that_fits_is_continued(turn, rollout) -> None:
    samples = to_samples(rollout(turn([1], [2]), turn([1, 2, 3], [4]), turn([1, 2], [9]), turn([1, 2, 3, 4, 7], [5])))
    assert [sample.completion_ids for sample in samples] == [[2, 3, 4, 7, 5], [9]]


def test_an_error_masks_all_completions_and_keeps_ids_and_logprobs(turn, rollout) -> None:
    (sample,) = to_samples(rollout(turn([1], [2, 3]), error="ModelError"))
    assert sample.completion_ids == [2, 3]
    assert sample.inference_logprobs == [-1.0, -1.0]
    assert sample.completion_mask == [False, False]


def test_a_rollout_without_tokens_gives_no_sample(rollout) -> None:
    assert to_samples(rollout()) == []


def test_the_turns_of_the_rollout_stay_as_they_are(turn, rollout) -> None:
    attempt = rollout(turn([1], [2]), turn([1, 2, 3], [4]))
    to_samples(attempt)
    assert [each.completion_ids for each in attempt.trace.calls] == [[2], [4]]
