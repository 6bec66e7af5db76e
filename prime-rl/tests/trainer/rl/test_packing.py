"""Packing: first-fit decreasing, and the same number of rows for every rank."""

from __future__ import annotations

import pytest

from prime_rl.trainer.rl.batches import (
    TrainerError,
    distribute,
    first_fit_decreasing,
    pack_batch,
    pack_rows,
    row_from_sample,
)
from prime_rl.transport.messages import TrainingBatch, TrainingSample


def sample_of(length: int, **changes) -> TrainingSample:
    fields = {
        "prompt_ids": [length],
        "prompt_mask": [False],
        "completion_ids": list(range(length - 1)),
        "completion_mask": [True] * (length - 1),
        "inference_logprobs": [-0.1 * i for i in range(length - 1)],
        "completion_temperatures": [0.7] * (length - 1),
        "advantage": float(length),
    }
    return TrainingSample(**fields | changes)


def lengths_of(rows) -> list[list[int]]:
    """Lengths of the sequences in each row. In these tests, a sequence's advantage equals its length."""
    return [[int(row.advantages[i]) for i, position in enumerate(row.position_ids) if position == 0] for row in rows]


def test_rows_are_those_of_the_reference() -> None:
    rows = pack_rows([row_from_sample(sample_of(n), 10) for n in (5, 3, 9, 2, 4, 6)], 10)
    assert lengths_of(rows) == [[9], [6, 4], [5, 3, 2]]


def test_rows_are_distributed_round_robin_and_filler_rows_have_an_empty_mask() -> None:
    rows = pack_rows([row_from_sample(sample_of(n), 10) for n in (5, 3, 9, 2, 4, 6)], 10)
    first, second = distribute(rows, 2)
    assert lengths_of(first) == [[9], [5, 3, 2]]
    assert lengths_of(second[:1]) == [[6, 4]]
    assert second[1].input_ids == rows[2].input_ids
    assert not any(second[1].loss_mask)
    assert set(second[1].advantages) == {0.0}
    assert any(rows[2].loss_mask), "the copied row itself is untouched"


def test_a_single_rank_gets_every_row_and_no_filler() -> None:
    rows = pack_rows([row_from_sample(sample_of(n), 4) for n in (3, 4, 2)], 4)
    assert distribute(rows, 1) == [rows]


def test_fields_of_a_sample_line_up_token_by_token() -> None:
    row = row_from_sample(sample_of(4, prompt_ids=[9, 8], prompt_mask=[False, False], teacher_logprobs=[-1.0] * 5), 10)
    assert row.input_ids == [9, 8, 0, 1, 2]
    assert row.loss_mask == [False, False, True, True, True]
    assert row.inference_logprobs == pytest.approx([0.0, 0.0, 0.0, -0.1, -0.2])
    assert row.temperatures == [0.7] * 5, "the prompt takes the first completion temperature"
    assert row.position_ids == [0, 1, 2, 3, 4]
    assert row.teacher_logprobs == [-1.0] * 5


def test_a_sample_without_completion_has_temperature_one() -> None:
    assert row_from_sample(sample_of(1), 10).temperatures == [1.0]


def test_a_long_sample_is_truncated_in_every_field() -> None:
    row = row_from_sample(sample_of(9, teacher_logprobs=[-1.0] * 9), 4)
    sized = [values for values in (getattr(row, name) for name in row.__struct_fields__) if isinstance(values, list)]
    assert [len(values) for values in sized] == [4] * 8


def test_no_bin_overflows_and_every_item_is_in_one_bin() -> None:
    lengths = [7, 7, 3, 5, 1, 1, 9, 2]
    bins = first_fit_decreasing(lengths, 10)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in members) <= 10 for members in bins)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completion_mask": [True]}, "completion_mask has 1 entries for 3 tokens"),
        ({"inference_logprobs": []}, "inference_logprobs has 0 entries for 3 tokens"),
        ({"teacher_logprobs": [0.0]}, "teacher_logprobs has 1 entries for 4 tokens"),
        ({"advantage": None}, "no advantage"),
        ({"pixel_values": [[0.0]]}, "images"),
        ({"prompt_ids": [50]}, r"token id 50, and the model has embeddings for 0\.\.49"),
        ({"completion_ids": [1, -1, 2]}, r"token id -1, and the model has embeddings for 0\.\.49"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_named(changes, message) -> None:
    batch = TrainingBatch([sample_of(4), sample_of(4, **changes)], step=6)
    with pytest.raises(TrainerError, match=f"sample 1 of the training batch of step 6: .*{message}"):
        pack_batch(batch, seq_len=8, row_tokens=8, data_ranks=1, vocab_size=50)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(TrainerError, match="step 2 is empty"):
        pack_batch(TrainingBatch([], step=2), seq_len=8, row_tokens=8, data_ranks=1)


def test_teacher_values_for_only_some_samples_are_refused() -> None:
    batch = TrainingBatch([sample_of(4), sample_of(4, teacher_logprobs=[0.0] * 4)], step=0)
    with pytest.raises(TrainerError, match="only some samples"):
        pack_batch(batch, seq_len=8, row_tokens=8, data_ranks=1)


def test_minibatches_share_the_tokens_and_every_rank_has_rows_of_each() -> None:
    lengths = (9, 8, 7, 6, 5, 4, 3, 2)
    ranks = pack_batch(TrainingBatch([sample_of(n) for n in lengths], step=0), 10, 10, data_ranks=2, minibatches=3)
    assert [[row.minibatch for row in rows] for rows in ranks] == [[0, 1, 2], [0, 1, 2]]
    tokens = [sum(sum(row.loss_mask) for rows in ranks for row in rows if row.minibatch == index) for index in range(3)]
    assert tokens == [9 + 6 + 3 - 3, 8 + 5 + 2 - 3, 7 + 4 - 2]


def test_samples_of_a_prompt_stay_together_if_they_fit() -> None:
    samples = [sample_of(n, prompt_ids=[prompt]) for prompt, n in [(1, 5), (1, 2), (1, 4), (2, 3), (2, 3), (1, 3)]]
    rows = pack_batch(TrainingBatch(examples=samples, step=0), 10, 20, 1, group_tokens=7)[0]
    assert lengths_of(rows) == [[5, 2, 3, 3, 4, 3]]
    assert lengths_of(pack_batch(TrainingBatch(examples=samples, step=0), 10, 20, 1)[0]) == [[5, 4, 3, 3, 3, 2]]


def test_a_batch_of_few_samples_has_fewer_minibatches() -> None:
    (rows,) = pack_batch(TrainingBatch([sample_of(4), sample_of(3)], step=0), 8, 8, data_ranks=1, minibatches=5)
    assert [row.minibatch for row in rows] == [0, 1]
