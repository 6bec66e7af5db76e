"""Sources of micro-batches for each step: the orchestrator's batches, packed into rows and dealt out to the ranks, or
random tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import torch
from transformers import PretrainedConfig

from prime_rl.configs.model import cpu_row_tokens
from prime_rl.configs.trainer import FakeDataLoaderConfig, TrainerConfig
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.model.images import Images
from prime_rl.trainer.process.errors import TrainerError
from prime_rl.trainer.process.mesh import DataAxis, Mesh
from prime_rl.trainer.process.world import Process
from prime_rl.trainer.rl.rows import is_image_token
from prime_rl.transport import (
    BatchReceiver,
    MicroBatchReceiver,
    MicroBatchSender,
    TransportError,
    setup_batch_receiver,
    setup_micro_batch_receiver,
    setup_micro_batch_sender,
)
from prime_rl.transport.messages import (
    ImageReference,
    LikeliestTokens,
    MicroBatch,
    RoutedExperts,
    TrainingBatch,
    TrainingSample,
)
from prime_rl.utils.logger import count_of


def pack_batch(
    batch: TrainingBatch,
    seq_len: int,
    row_tokens: int,
    data_ranks: int,
    minibatches: int = 1,
    group_tokens: int = 0,
    vocab_size: int | None = None,
) -> list[list[MicroBatch]]:
    """Pack a batch into micro-batches for each data rank. Every rank gets the same number per minibatch.

    Samples are truncated to `seq_len` tokens, and rows have at most `row_tokens` (>= `seq_len`) tokens. There are at
    most as many minibatches as samples. Consecutive samples of the same prompt are kept in one row up to `group_tokens`
    (<= `row_tokens`) tokens, so that attention can share their prefix.

    Raises:
        TrainerError: the batch is empty, or a sample is invalid.
    """
    if not batch.examples:
        raise TrainerError(f"the training batch of step {batch.step} is empty")
    for index, sample in enumerate(batch.examples):
        fault = find_fault(sample, vocab_size)
        if fault is not None:
            raise TrainerError(f"sample {index} of the training batch of step {batch.step}: {fault}")
    images = {each.digest: each for each in batch.images}
    samples = [row_from_sample(sample, seq_len, images) for sample in batch.examples]
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
    if sample.teacher_top is not None:
        trained = sum(_loss_mask(sample))
        top_ids = np.frombuffer(sample.teacher_top.ids, np.int32)
        if (fault := sample.teacher_top.fault(trained, "teacher_top")) is not None:
            return fault
        if vocab_size is not None and len(top_ids) and not 0 <= top_ids.min() <= top_ids.max() < vocab_size:
            return f"a teacher names the token id {top_ids.max()}, and the model has embeddings for 0..{vocab_size - 1}"
    if sample.sampler_top is not None:
        top_ids = np.frombuffer(sample.sampler_top.ids, np.int32)
        if (fault := sample.sampler_top.fault(completion, "sampler_top")) is not None:
            return fault
        if vocab_size is not None and len(top_ids) and not 0 <= top_ids.min() <= top_ids.max() < vocab_size:
            return f"the engine names the token id {top_ids.max()}, and the model has 0..{vocab_size - 1}"
    if sample.routed_experts is not None and len(sample.routed_experts) != prompt + completion:
        return f"routed_experts has {len(sample.routed_experts)} entries for {prompt + completion} tokens"
    if sample.pixel_values is not None or sample.image_grid_thw is not None:
        return "it has pixel_values, and the trainer reads images by itself: name them in `images`"
    return None


def check_images(batch: TrainingBatch, images: Images | None) -> None:
    """Check that the trainer sees of each image what the policy has seen. `images` reads them.

    Raises:
        TrainerError: it does not.
    """
    known = {each.digest: each for each in batch.images}
    for index, sample in enumerate(batch.examples):
        named = sample.images or []
        if fault := _images_fault(sample, [known.get(digest) for digest in named], images):
            raise TrainerError(f"sample {index} of the training batch of step {batch.step}: {fault}")


def _images_fault(sample: TrainingSample, named: Sequence[ImageReference | None], images: Images | None) -> str | None:
    given = [each for each in named if each is not None]
    if len(given) < len(named):
        return "it names an image that the batch does not have"
    if images is None:
        return "it has images, and the trainer reads none: set [model.vision]" if given else None
    ids = sample.prompt_ids + sample.completion_ids
    of_engine = is_image_token(ids, [0.0] * len(sample.prompt_ids) + sample.inference_logprobs, images)
    written, features = int(of_engine.sum()), sum(images.of_rollout(each).tokens for each in given)
    if written == features:
        return None
    if not given:
        return f"a text holds {images.reader.family.token}, the token that stands for images: remove it"
    return (
        f"the engine wrote {written} tokens for {count_of('image', len(given))}, and the trainer's image processor "
        f"makes {features} features: both must read the same preprocessor_config.json"
    )


def row_from_sample(
    sample: TrainingSample, seq_len: int, images: Mapping[str, ImageReference] | None = None
) -> MicroBatch:
    """Convert a valid sample to a micro-batch of one sequence, truncated to `seq_len` tokens. `images`: those of the
    batch, by their digests."""
    assert sample.advantage is not None
    prompt, completion = len(sample.prompt_ids), len(sample.completion_ids)
    length = prompt + completion
    first_temperature = sample.completion_temperatures[0] if completion else 1.0
    row = MicroBatch(
        input_ids=sample.prompt_ids + sample.completion_ids,
        loss_mask=_loss_mask(sample),
        advantages=[sample.advantage] * length
        if sample.completion_advantages is None
        else [sample.advantage] * prompt + sample.completion_advantages,
        inference_logprobs=[0.0] * prompt + sample.inference_logprobs,
        position_ids=list(range(length)),
        temperatures=[first_temperature] * prompt + sample.completion_temperatures,
        teacher_logprobs=sample.teacher_logprobs,
        versions=[-1 if sample.version is None else sample.version] * length,
        kept_as=None if sample.kept_as is None else [sample.kept_as],
        teacher_top=sample.teacher_top,
        routed_experts=sample.routed_experts,
        images=[[images[digest] for digest in sample.images]] if sample.images and images else None,
        sampler_top=None if sample.sampler_top is None else _at_trained(sample, sample.sampler_top),
    )
    return row if length <= seq_len else _cut(row, seq_len)


def _at_trained(sample: TrainingSample, top: LikeliestTokens) -> LikeliestTokens:
    """What the engine reported of a sample's trained tokens: nothing of a prompt's."""
    start = len(sample.prompt_ids)
    return top.chosen([max(place - start, -1) for place, is_trained in enumerate(_loss_mask(sample)) if is_trained])


def _loss_mask(sample: TrainingSample) -> list[bool]:
    mask = sample.prompt_mask + sample.completion_mask
    mask[0] = False  # nothing predicts the first token
    return mask


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
        teacher_top=None if rows[-1].teacher_top is None else rows[-1].teacher_top.places(0),
        sampler_top=None if rows[-1].sampler_top is None else rows[-1].sampler_top.places(0),
    )
    assigned = [*rows, *[filler] * missing]
    return [assigned[rank::data_ranks] for rank in range(data_ranks)]


def _join(rows: Sequence[MicroBatch]) -> MicroBatch:
    with_teacher = sum(row.teacher_logprobs is not None for row in rows)
    if with_teacher not in (0, len(rows)):
        raise TrainerError("only some samples of the training batch have teacher_logprobs")
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
        teacher_top=_join_tops([row.teacher_top for row in rows], "a teacher's likeliest tokens"),
        sampler_top=_join_tops([row.sampler_top for row in rows], "likeliest tokens from the engine"),
        routed_experts=RoutedExperts.joined([row.routed_experts for row in rows]),
        images=_join_images(rows),
    )


def _join_tops(tops: Sequence[LikeliestTokens | None], what: str) -> LikeliestTokens | None:
    try:
        return LikeliestTokens.joined(tops)
    except ValueError as error:
        raise TrainerError(f"the samples of the training batch have different numbers of {what}") from error


def _join_kept(rows: Sequence[MicroBatch]) -> list[list[int] | None] | None:
    if all(row.kept_as is None for row in rows):
        return None
    return [each for row in rows for each in row.kept_as or [None] * row.position_ids.count(0)]


def _join_images(rows: Sequence[MicroBatch]) -> list[list[ImageReference]] | None:
    if all(row.images is None for row in rows):
        return None
    return [each for row in rows for each in row.images or [[] for _ in range(row.position_ids.count(0))]]


def _cut(row: MicroBatch, length: int) -> MicroBatch:
    fields = {name: getattr(row, name) for name in row.__struct_fields__}
    cut = {name: values[:length] for name, values in fields.items() if isinstance(values, list)}
    top = None if row.teacher_top is None else row.teacher_top.places(sum(cut["loss_mask"]))
    routes = None if row.routed_experts is None else row.routed_experts.tokens(end=length)
    sampled = None if row.sampler_top is None else row.sampler_top.places(sum(cut["loss_mask"]))
    return msgspec.structs.replace(row, **cut, teacher_top=top, routed_experts=routes, sampler_top=sampled)


EndpointT = TypeVar("EndpointT", BatchReceiver, MicroBatchSender, MicroBatchReceiver)

FAKE_TOKEN_IDS = 100
"""Fake token ids are below this number, so that they are valid in every vocabulary."""


class BatchSource(Protocol):
    """Provides the rows that this process trains on in each step."""

    early_end: str | None
    """Why the run ends in place of the step that is ready. Only the main process knows it."""

    def is_ready(self, step: int) -> bool:
        """Whether every process can `take` its rows. Call on the main process only; never blocks."""

    def take(self, step: int) -> list[MicroBatch]:
        """Return the rows of this process's data rank. Every data rank gets the same number of rows."""

    def close(self) -> None: ...


class PackedBatches:
    """Packs the orchestrator's batches on the main process and sends each data rank its rows."""

    def __init__(
        self,
        config: TrainerConfig,
        paths: RunPaths,
        mesh: Mesh,
        limit: int,
        vocab_size: int | None = None,
        images: Images | None = None,
    ) -> None:
        """`limit` is the row capacity in tokens, `vocab_size` that of the model, if it is known. `images` reads the
        images of samples; None if they have none."""
        seq_len, process, data_axis = config.model.seq_len, mesh.process, mesh.data_axis
        # Keep groups together only on a CPU: the GPU kernels for packed rows do not share prefixes, so there it is
        # better to fill the rows.
        group_tokens = limit // 2 if process.device.type == "cpu" else 0
        self._pack: Callable[[TrainingBatch], list[list[MicroBatch]]] = lambda batch: pack_batch(
            batch, seq_len, limit, data_axis.data_size, config.minibatches, group_tokens, vocab_size
        )
        self._images = images
        self._own_rows: list[MicroBatch] = []
        self.early_end: str | None = None
        self._readers = readers_by_data_rank(process, data_axis)
        transport = config.rollout_transport
        self._closing = ExitStack()
        with _transport_errors():
            if process.is_main:
                self._batches = self._close_on_exit(setup_batch_receiver(transport, paths.orchestrator))
                if self._readers:
                    self._ranks = self._close_on_exit(setup_micro_batch_sender(transport, paths, self._readers))
            else:
                rows = setup_micro_batch_receiver(transport, paths, data_axis.data_rank)
                self._rows = self._close_on_exit(rows)
        self._is_main = process.is_main

    def is_ready(self, step: int) -> bool:
        batch = self._batches.receive(step)
        if batch is None:
            return False
        if batch.early_end is not None:
            self.early_end = batch.early_end
            return True
        check_images(batch, self._images)
        rows_of_ranks = self._pack(batch)
        self._own_rows = rows_of_ranks[0]
        if self._readers:
            with _transport_errors():
                self._ranks.send(step, {data_rank: rows_of_ranks[data_rank] for data_rank in self._readers})
        return True

    def take(self, step: int) -> list[MicroBatch]:
        if self._is_main:
            return self._own_rows
        with _transport_errors():
            return self._rows.receive(step)

    def close(self) -> None:
        self._closing.close()

    def _close_on_exit(self, endpoint: EndpointT) -> EndpointT:
        self._closing.callback(endpoint.close)
        return endpoint


class FakeBatches:
    """Generates random tokens, advantages and log-probabilities, to run the trainer without an orchestrator."""

    def __init__(self, config: FakeDataLoaderConfig, seq_len: int, data_axis: DataAxis) -> None:
        self.config = config
        self.seq_len = seq_len
        self.data_axis = data_axis
        self.early_end: str | None = None

    def is_ready(self, step: int) -> bool:
        return True

    def take(self, step: int) -> list[MicroBatch]:
        """`batch_size` rows over all data ranks, at least one on each: full, or packed from short documents."""
        count = max(1, self.config.batch_size // self.data_axis.data_size)
        rng = np.random.default_rng((self.data_axis.data_rank, step))
        if not self.config.generate_samples:
            return [fake_row(rng, self.seq_len) for _ in range(count)]
        rows: list[MicroBatch] = []
        while len(rows) < count:
            lengths = rng.integers(max(2, self.seq_len // 8), self.seq_len // 2, size=4 * count, endpoint=True)
            rows += pack_rows([fake_row(rng, int(length)) for length in lengths], self.seq_len)
        return rows[:count]

    def close(self) -> None:
        """Do nothing."""


@contextmanager
def _transport_errors() -> Iterator[None]:
    """Convert a TransportError, whose message is enough, to an error that is logged without a traceback."""
    try:
        yield
    except TransportError as error:
        raise TrainerError(str(error)) from error


def readers_by_data_rank(process: Process, data_axis: DataAxis) -> dict[int, int]:
    """Number of processes that read each data rank's rows, without the main process. Ranks with none are omitted."""
    sharing = process.world_size // data_axis.data_size
    # The main process has data rank 0 and keeps its own rows.
    readers = {data_rank: sharing - (data_rank == 0) for data_rank in range(data_axis.data_size)}
    return {data_rank: count for data_rank, count in readers.items() if count}


def row_tokens(seq_len: int, model: PretrainedConfig, device: torch.device) -> int:
    """Capacity of a packed row in tokens."""
    if device.type != "cpu":
        return seq_len
    text = model.get_text_config()
    return cpu_row_tokens(seq_len, text.hidden_size, text.num_hidden_layers)


def fake_row(rng: np.random.Generator, length: int) -> MicroBatch:
    """One sequence of random tokens. All but the first are in the loss mask."""
    return MicroBatch(
        input_ids=rng.integers(0, FAKE_TOKEN_IDS, size=length).tolist(),
        loss_mask=[False] + [True] * (length - 1),
        advantages=[float(rng.normal())] * length,
        inference_logprobs=(-rng.random(length)).tolist(),
        position_ids=list(range(length)),
        temperatures=[1.0] * length,
    )
