"""Packs training samples into rows and distributes the rows over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from prime_rl.trainer.process.errors import TrainerError
from prime_rl.transport.messages import MicroBatch, TrainingBatch, TrainingSample


class BadBatch(TrainerError):
    """The orchestrator sent a batch that cannot be trained on."""


def pack_batch(
    batch: TrainingBatch,
    seq_len: int,
    row_tokens: int,
    data_ranks: int,
    minibatches: int = 1,
    group_tokens: int = 0,
    vocab_size: int | None = None,
) -> list[list[MicroBatch]]:
    """Pack a batch into rows for each data-parallel rank. Every rank gets the same number of rows per minibatch.

    Samples are truncated to `seq_len` tokens, and rows have at most `row_tokens` (>= `seq_len`) tokens. There are at
    most as many minibatches as samples. Consecutive samples of the same prompt are kept in one row up to `group_tokens`
    (<= `row_tokens`) tokens, so that attention can share their prefix.

    Raises:
        BadBatch: the batch is empty, or a sample is invalid.
    """
    if not batch.examples:
        raise BadBatch(f"the training batch of step {batch.step} is empty")
    for index, sample in enumerate(batch.examples):
        fault = find_fault(sample, vocab_size)
        if fault is not None:
            raise BadBatch(f"sample {index} of the training batch of step {batch.step}: {fault}")
    samples = [row_from_sample(sample, seq_len) for sample in batch.examples]
    # Assigned in order of length, so that minibatches have about the same number of tokens.
    by_length = sorted(samples, key=lambda row: -len(row.input_ids)) if minibatches > 1 else samples
    split = [by_length[index::minibatches] for index in range(min(minibatches, len(samples)))]
    rows_of_ranks: list[list[MicroBatch]] = [[] for _ in range(data_ranks)]
    for index, minibatch in enumerate(split):
        packed = pack_rows(join_groups(minibatch, group_tokens), row_tokens)
        for rows, assigned in zip(rows_of_ranks, distribute(packed, data_ranks), strict=True):
            rows += [msgspec.structs.replace(row, minibatch=index) for row in assigned]
    return rows_of_ranks


def find_fault(sample: TrainingSample, vocab_size: int | None = None) -> str | None:
    """Return what is wrong with a sample, or None if it is valid. `vocab_size` is the model's, if it is known."""
    prompt, completion = len(sample.prompt_ids), len(sample.completion_ids)
    expected: dict[str, tuple[Sequence[object], int]] = {
        "prompt_mask": (sample.prompt_mask, prompt),
        "completion_mask": (sample.completion_mask, completion),
        "inference_logprobs": (sample.inference_logprobs, completion),
        "completion_temperatures": (sample.completion_temperatures, completion),
    }
    if sample.teacher_logprobs is not None:
        expected["teacher_logprobs"] = (sample.teacher_logprobs, prompt + completion)
    if sample.completion_advantages is not None:
        expected["completion_advantages"] = (sample.completion_advantages, completion)
    for name, (values, length) in expected.items():
        if len(values) != length:
            return f"{name} has {len(values)} entries for {length} tokens"
    if any(temperature <= 0 for temperature in sample.completion_temperatures):
        return "its temperature is 0, and the trainer divides logits by it"
    if prompt + completion == 0:
        return "it has no tokens"
    ids = sample.prompt_ids + sample.completion_ids
    if vocab_size is not None and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = max(ids) if max(ids) >= vocab_size else min(ids)
        return f"it has the token id {wrong}, and the model has embeddings for 0..{vocab_size - 1}"
    if sample.advantage is None:
        return "it has no advantage"
    if sample.pixel_values is not None or sample.image_grid_thw is not None:
        return "it has images, and training on images is not supported yet"
    return None


def row_from_sample(sample: TrainingSample, seq_len: int) -> MicroBatch:
    """Convert a valid sample to a row of its own, truncated to `seq_len` tokens."""
    assert sample.advantage is not None
    prompt, completion = len(sample.prompt_ids), len(sample.completion_ids)
    length = prompt + completion
    first_temperature = sample.completion_temperatures[0] if completion else 1.0
    loss_mask = sample.prompt_mask + sample.completion_mask
    loss_mask[0] = False  # nothing predicts the first token
    row = MicroBatch(
        input_ids=sample.prompt_ids + sample.completion_ids,
        loss_mask=loss_mask,
        advantages=[sample.advantage] * length
        if sample.completion_advantages is None
        else [sample.advantage] * prompt + sample.completion_advantages,
        inference_logprobs=[0.0] * prompt + sample.inference_logprobs,
        position_ids=list(range(length)),
        temperatures=[first_temperature] * prompt + sample.completion_temperatures,
        teacher_logprobs=sample.teacher_logprobs,
        versions=[-1 if sample.version is None else sample.version] * length,
        kept_as=None if sample.kept_as is None else [sample.kept_as],
    )
    return row if length <= seq_len else _cut(row, seq_len)


def join_groups(rows: Sequence[MicroBatch], group_tokens: int) -> list[MicroBatch]:
    """Join consecutive rows with the same prompt into rows of at most `group_tokens` tokens."""
    groups: list[list[MicroBatch]] = []
    prompt: list[int] | None = None
    room = 0
    for row in rows:
        length = len(row.input_ids)
        own = row.input_ids[: row.loss_mask.index(True)] if True in row.loss_mask else None
        if own is not None and own == prompt and length <= room:
            groups[-1].append(row)
            room -= length
        else:
            groups.append([row])
            prompt, room = own, group_tokens - length
    return [group[0] if len(group) == 1 else _join(group) for group in groups]


def pack_rows(rows: Sequence[MicroBatch], row_tokens: int) -> list[MicroBatch]:
    """Pack rows into rows of at most `row_tokens` tokens each, by first-fit decreasing."""
    bins = first_fit_decreasing([len(row.input_ids) for row in rows], row_tokens)
    return [_join([rows[index] for index in members]) for members in bins]


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign indices of `lengths` to bins: longest first, each to the first bin with enough space, or to a new one."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        target = next((candidate for candidate, space in enumerate(free) if length <= space), None)
        if target is None:
            bins.append([])
            free.append(capacity)
            target = len(bins) - 1
        bins[target].append(index)
        free[target] -= length
    return bins


def distribute(rows: Sequence[MicroBatch], data_ranks: int) -> list[list[MicroBatch]]:
    """Distribute rows round-robin, so that all ranks process rows of similar length at the same time.

    If the count is not divisible by `data_ranks`, the last row is repeated with an empty mask: every forward pass is a
    collective, so all ranks must run the same number of them.
    """
    missing = -len(rows) % data_ranks
    filler = msgspec.structs.replace(
        rows[-1],
        loss_mask=[False] * len(rows[-1].loss_mask),
        advantages=[0.0] * len(rows[-1].advantages),
        kept_as=None,
    )
    assigned = [*rows, *[filler] * missing]
    return [assigned[rank::data_ranks] for rank in range(data_ranks)]


def _join(rows: Sequence[MicroBatch]) -> MicroBatch:
    with_teacher = sum(row.teacher_logprobs is not None for row in rows)
    if with_teacher not in (0, len(rows)):
        raise BadBatch("only some samples of the training batch have teacher_logprobs")
    return MicroBatch(
        input_ids=[value for row in rows for value in row.input_ids],
        loss_mask=[value for row in rows for value in row.loss_mask],
        advantages=[value for row in rows for value in row.advantages],
        inference_logprobs=[value for row in rows for value in row.inference_logprobs],
        position_ids=[value for row in rows for value in row.position_ids],
        temperatures=[value for row in rows for value in row.temperatures],
        teacher_logprobs=[value for row in rows for value in row.teacher_logprobs or []] if with_teacher else None,
        versions=[value for row in rows for value in row.versions or [-1] * len(row.input_ids)],
        kept_as=_join_kept(rows),
    )


def _join_kept(rows: Sequence[MicroBatch]) -> list[list[int] | None] | None:
    if all(row.kept_as is None for row in rows):
        return None
    return [each for row in rows for each in row.kept_as or [None] * row.position_ids.count(0)]


def _cut(row: MicroBatch, length: int) -> MicroBatch:
    fields = {name: getattr(row, name) for name in row.__struct_fields__}
    cut = {name: values[:length] for name, values in fields.items() if isinstance(values, list)}
    return msgspec.structs.replace(row, **cut)
