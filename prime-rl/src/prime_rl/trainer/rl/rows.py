"""Micro-batches as tensors, sums over each of their sequences, and the model's log-probabilities for their tokens.

A loss that goes through the sequences one by one takes hundreds of small operations for each. On a GPU it would also
wait several times for each, because the number of a mask's true elements is known only there. So the layout of a
micro-batch is computed on the host, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from prime_rl.configs.trainer import ModelConfig
from prime_rl.trainer.distillation import TopTokens, divergences
from prime_rl.trainer.model.images import Images, RowImages
from prime_rl.trainer.model.scoring import (
    AUTO_VOCAB_CHUNK,
    LogitsOf,
    logprobs_and_entropies,
    logprobs_beside_sampler,
    replaying,
    score_tokens,
    scoring_of,
    seeing,
)
from prime_rl.trainer.process.errors import TrainerError
from prime_rl.transport.messages import LikeliestTokens, MicroBatch, RoutedExperts
from prime_rl.transport.weights import to_device


@dataclass(frozen=True, slots=True)
class Sequences:
    """S sequences with M trained tokens in all, which lie one after another. Each has at least one."""

    lengths_S: Tensor
    """Number of trained tokens of each, float32."""
    sequence_of_M: Tensor
    cell_of_M: Tensor
    """Place of each token in a grid with one row per sequence, as wide as the longest."""
    longest: int
    first_S: Tensor
    """Index of the first token of each, among the M."""

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device) -> Self:
        counts, longest = np.array(lengths, dtype=np.int64), max(lengths, default=0)
        sequence_of = np.repeat(np.arange(len(counts)), counts)
        first_of = np.cumsum(counts) - counts
        cell_of = sequence_of * longest + np.arange(len(sequence_of)) - first_of[sequence_of]
        numbers, sequence, cell, first = (
            to_device(torch.from_numpy(each), device)
            for each in (counts.astype(np.float32), sequence_of, cell_of, first_of)
        )
        return cls(numbers, sequence, cell, longest, first)

    def __len__(self) -> int:
        return len(self.lengths_S)

    def sum(self, values_M: Tensor) -> Tensor:
        """The sum over each sequence's tokens, [S]. It has a gradient."""
        return self._grid(values_M, 0).sum(1)

    def sum_before(self, values_M: Tensor) -> Tensor:
        """The sum over the tokens before each one in its sequence, [M]."""
        grid = self._grid(values_M, 0)
        return (grid.cumsum(1) - grid).flatten().index_select(0, self.cell_of_M)

    def sum_from(self, values_M: Tensor, factor: float) -> Tensor:
        """The sum of each token's value and those after it in its sequence, each later one times `factor` once more.

        It doubles the tokens in the sum in each of log2(longest) rounds: all on the device, in a fixed order.
        """
        grid, width = self._grid(values_M, 0), 1
        while width < self.longest:
            grid = grid + factor**width * torch.nn.functional.pad(grid[:, width:], (0, width))
            width *= 2
        return grid.flatten().index_select(0, self.cell_of_M)

    def following(self, values_M: Tensor) -> Tensor:
        """The value of the token after each one in its sequence, and 0 for the last one, [M]."""
        grid = torch.nn.functional.pad(self._grid(values_M, 0)[:, 1:], (0, 1))
        return grid.flatten().index_select(0, self.cell_of_M)

    def mean(self, values_M: Tensor) -> Tensor:
        """[S]"""
        return self.sum(values_M) / self.lengths_S

    def min(self, values_M: Tensor) -> Tensor:
        """[S]"""
        return self._grid(values_M, torch.inf).amin(1)

    def max(self, values_M: Tensor) -> Tensor:
        """[S]"""
        return self._grid(values_M, -torch.inf).amax(1)

    def spread(self, values_S: Tensor) -> Tensor:
        """Each token gets its sequence's value, [M]."""
        return values_S.index_select(0, self.sequence_of_M)

    def _grid(self, values_M: Tensor, padding: float) -> Tensor:
        # Every cell is written at most once, so that the sum's order, and with it its rounding, is always the same.
        cells = values_M.new_full((len(self) * self.longest,), padding)
        return cells.index_copy(0, self.cell_of_M, values_M).view(len(self), self.longest)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Bounds of the sequences in a micro-batch of T tokens, and the tokens that are trained (masked in)."""

    lengths: list[int]
    """Number of tokens of each sequence; they sum to T."""
    num_trained: list[int]
    """Number of trained tokens of each sequence; they sum to M."""
    trained_M: Tensor
    """Index of each trained token in the row."""
    sequences: Sequences
    """Those with trained tokens."""
    turns: Sequences
    """Their turns: runs of trained tokens, between tokens of prompts and environments."""
    turns_of: Sequences
    """The sequences once more, as sequences of turns: a turn takes the place of a token."""
    observed_O: Tensor
    """Index in the row of each token that an environment wrote after a trained token of its sequence, with the
    template's frame around it. Tokens that the model sampled and an environment masks are none of these."""

    @classmethod
    def of_mask(
        cls, loss_mask_T: Tensor, lengths: list[int], device: torch.device, sampled_T: Tensor | None = None
    ) -> Self:
        """`loss_mask_T` and `sampled_T`, the tokens that an engine sampled, are on the host; the result's tensors are
        on `device`. None: those that are trained."""
        num_trained = [int(mask.sum()) for mask in loss_mask_T.split(lengths)]
        trained = to_device(loss_mask_T.nonzero().flatten(), device)
        begun_T = torch.cat([mask.cumsum(0) > 0 for mask in loss_mask_T.split(lengths)])
        observed = to_device(
            (begun_T & ~(loss_mask_T if sampled_T is None else loss_mask_T | sampled_T)).nonzero().flatten(), device
        )
        sequences = Sequences.of_lengths([each for each in num_trained if each], device)
        of_turns = [runs for mask in loss_mask_T.split(lengths) if (runs := _runs(mask))]
        counts = [len(runs) for runs in of_turns]
        turns = sequences
        if max(counts, default=1) > 1:
            turns = Sequences.of_lengths([run for runs in of_turns for run in runs], device)
        return cls(lengths, num_trained, trained, sequences, turns, Sequences.of_lengths(counts, device), observed)


def _runs(mask_T: Tensor) -> list[int]:
    """Lengths of the runs of true elements."""
    edges = np.flatnonzero(np.diff(mask_T.numpy().astype(np.int8), prepend=0, append=0))
    return (edges[1::2] - edges[::2]).tolist()


def sequence_lengths(position_ids: Tensor) -> list[int]:
    """Lengths of the sequences packed in a row of T tokens.

    A sequence starts at a position 0 that follows a nonzero position and precedes a 1. A sequence of one token is
    therefore counted as part of the sequence before it.
    """
    before, here, after = position_ids[:-2], position_ids[1:-1], position_ids[2:]
    starts = ((here == 0) & (before != 0) & (after == 1)).nonzero().flatten() + 1
    return [end - start for start, end in pairwise([0, *starts.tolist(), len(position_ids)])]


@dataclass(frozen=True, slots=True)
class Estimates:
    """What a critic expects of a row at the start of a step, and what it shall expect, at P places.

    Places are the M trained tokens, or the first tokens of the turns.
    """

    values_P: Tensor
    returns_P: Tensor


@dataclass(frozen=True, slots=True)
class SamplerTop:
    """The likeliest tokens of the policy that sampled, at M places; the token itself is among them."""

    ids_MK: Tensor
    """-1: no token."""
    logprobs_MK: Tensor
    """At the temperature of the sample, and minus infinity where there is no token."""
    is_support_M: Tensor
    """Whether the token was sampled from these alone, by top-k, top-p or min-p."""

    @classmethod
    def of(cls, message: LikeliestTokens, device: torch.device) -> Self:
        top = top_tokens(message, device)
        ids_MK, logprobs_MK = top.ids_MNK[:, 0], top.logprobs_MNK[:, 0]
        return cls(ids_MK.masked_fill(logprobs_MK.isneginf(), -1), logprobs_MK, top.weights_MN[:, 0] > 0)

    def log_unreported(self) -> Tensor:
        """-log of the probability of the tokens of a support that were reported, [M]: 0 but for rounding, unless an
        engine also keeps tokens that are as likely as the last of `top_k`. Those count on neither side."""
        return torch.where(self.is_support_M, -self.logprobs_MK.logsumexp(-1), 0.0)

    def at(self, places_P: Tensor, layout: RowLayout, tokens: int) -> tuple[Tensor, Tensor]:
        """Ids [P, K] and `is_support` [P] at places of a row of T tokens; no tokens where none is trained."""
        number_T = self.ids_MK.new_full((tokens,), -1)
        number_T[layout.trained_M] = torch.arange(len(self.ids_MK), device=number_T.device)
        number_P = number_T[places_P]
        if not len(self.ids_MK):  # a row that only keeps processes in step
            return self.ids_MK.new_full((len(places_P), self.ids_MK.shape[1]), -1), number_P >= 0
        known_P = number_P.clamp(min=0)
        ids_PK = self.ids_MK[known_P].masked_fill((number_P < 0)[:, None], -1)
        return ids_PK, self.is_support_M[known_P] & (number_P >= 0)


@dataclass(frozen=True, slots=True)
class Row:
    """A packed row of T tokens in one or more sequences. Tensors are [T] and on the model's device."""

    layout: RowLayout
    input_ids: Tensor
    position_ids: Tensor
    """On the host, for `score_tokens`."""
    loss_mask: Tensor
    advantages: Tensor
    """Until a critic has replaced them: what each token is worth, which is the reward of its sequence or call."""
    inference_logprobs: Tensor
    temperatures: Tensor
    teacher_logprobs: Tensor | None
    versions: Tensor
    """Oldest policy version that sampled the token's sequence; -1 if unknown."""
    age: Tensor | None = None
    """Number of updates since that version, 0 if unknown. None if the trained version was not given."""
    minibatch: int = 0
    """Index of the optimizer update within the step that this row belongs to."""
    is_dropped: Tensor | None = None
    """Tokens that the loss leaves out because of the second moment of the update; None if it is not limited."""
    proximal_logprobs: Tensor | None = None
    """Log-probabilities under the policy at the start of the step; None if the loss does not need them."""
    reference_logprobs: Tensor | None = None
    """Log-probabilities under the reference model; None if the loss does not need them."""
    teacher_top: TopTokens | None = None
    """At the M trained tokens."""
    estimates: Estimates | None = None
    """A critic's; None without one."""
    kept_as: list[list[int] | None] | None = None
    """For each sequence, the kept rollout that it belongs to, as in `TrainingSample`. None if no sequence is kept."""
    sampler_top: SamplerTop | None = None
    """At the M trained tokens. None if the engine did not report them."""
    routed_experts: Tensor | None = None
    """The experts [T, layers, k] that the engine chose, for `trainer.enable_router_replay`. None: the model chooses."""
    images: Callable[[], RowImages | None] | None = None
    """Reads its images, which takes more memory than the rest of the row. None if it has none."""

    @classmethod
    def from_message(
        cls, message: MicroBatch, device: torch.device, version: int | None = None, images: Images | None = None
    ) -> Row:
        """`version` is the policy version that the row trains. `images` reads the images of rows."""

        def floats(values: list[float]) -> Tensor:
            return to_device(torch.tensor(values, dtype=torch.float32), device)

        # Counted on the host, to avoid synchronizing with the GPU.
        position_ids, loss_mask = torch.tensor(message.position_ids), torch.tensor(message.loss_mask, dtype=torch.bool)
        versions = message.versions or [-1] * len(message.input_ids)
        # What was not sampled has the log-probability 0.
        sampled = torch.tensor(message.inference_logprobs) != 0
        layout = RowLayout.of_mask(loss_mask, sequence_lengths(position_ids), device, sampled)
        inference_logprobs = floats(message.inference_logprobs)
        sampler_top = None if message.sampler_top is None else SamplerTop.of(message.sampler_top, device)
        if sampler_top is not None:
            inference_logprobs.index_add_(0, layout.trained_M, sampler_top.log_unreported())
        return cls(
            layout=layout,
            input_ids=to_device(torch.tensor(message.input_ids), device),
            position_ids=position_ids,
            loss_mask=to_device(loss_mask, device),
            advantages=floats(message.advantages),
            inference_logprobs=inference_logprobs,
            temperatures=floats(message.temperatures),
            teacher_logprobs=None if message.teacher_logprobs is None else floats(message.teacher_logprobs),
            versions=to_device(torch.tensor(versions), device),
            age=None if version is None else floats([max(version - own, 0) if own >= 0 else 0 for own in versions]),
            minibatch=message.minibatch,
            kept_as=message.kept_as,
            teacher_top=None if message.teacher_top is None else top_tokens(message.teacher_top, device),
            sampler_top=sampler_top,
            routed_experts=None if message.routed_experts is None else expert_ids(message.routed_experts, device),
            images=None if message.images is None or images is None else _reader_of(message, images),
        )

    @property
    def trained_tokens(self) -> int:
        """Number of masked-in tokens."""
        return sum(self.layout.num_trained)

    def on_policy_mask(self, version: int) -> Tensor:
        """Boolean mask [T] of the masked-in tokens that were sampled from `version`, the trainer's current one.

        No newer version exists, so a sequence is on-policy if its oldest version is `version`. At version 0, all are.
        """
        return self.loss_mask if version == 0 else self.loss_mask & (self.versions == version)


def is_image_token(ids: Sequence[int], inference_logprobs: Sequence[float], images: Images) -> np.ndarray:
    """Which tokens the engine wrote for images. One that the policy happened to sample is not among them."""
    return (np.array(ids) == images.reader.token_id) & (np.array(inference_logprobs) == 0)


def _reader_of(message: MicroBatch, images: Images) -> Callable[[], RowImages | None]:
    is_image_T = is_image_token(message.input_ids, message.inference_logprobs, images)
    starts = np.flatnonzero(np.array(message.position_ids) == 0)
    of_sequences = [[images.of_rollout(each) for each in sequence] for sequence in message.images or ()]
    sequences = list(zip(np.split(is_image_T, starts[1:]), of_sequences, strict=True))
    return partial(images.of_row, sequences, len(message.input_ids))


def top_tokens(top: LikeliestTokens, device: torch.device) -> TopTokens:
    def on_device(values: bytes, dtype: str, *shape: int) -> Tensor:
        # A copy: the message's bytes are read-only.
        return to_device(torch.from_numpy(np.frombuffer(values, dtype).reshape(-1, *shape).copy()), device)

    ids = on_device(top.ids, "<i4", top.sources, top.k).long()
    return TopTokens(
        ids, on_device(top.logprobs, "<f4", top.sources, top.k), on_device(top.weights, "<f4", top.sources)
    )


def expert_ids(routes: RoutedExperts, device: torch.device) -> Tensor:
    """[T, layers, k]"""
    # int16: PyTorch computes little with uint16, and no model has 32,768 experts.
    ids = np.frombuffer(routes.ids, np.uint8 if routes.width == 1 else "<i2").copy()
    return to_device(torch.from_numpy(ids).view(-1, routes.layers, routes.top_k), device)


def check_routes(rows: Sequence[Row], model: PreTrainedModel) -> None:
    """Check that the routers of `model` can choose the experts of all rows.

    Raises:
        TrainerError: a row has none, or those of another model.
    """
    routers = scoring_of(model).routers
    assert routers is not None, "the model was checked when it was built"
    expected = (model.config.get_text_config().num_hidden_layers, routers.top_k)
    for row in rows:
        routes = row.routed_experts
        if routes is None:
            raise TrainerError(
                "enable_router_replay: a sample has no routed experts: set enable_return_routed_experts = true for all "
                "servers; tensors that a workflow returns have none, and cannot be replayed"
            )
        if routes.shape[1:] != expected or int(routes.max()) >= routers.num_experts:
            raise TrainerError(
                f"enable_router_replay: a server chose {routes.shape[2]} experts in {routes.shape[1]} layers, up to "
                f"number {int(routes.max())}, and the model takes {routers.top_k} of {routers.num_experts} in "
                f"{expected[0]}"
            )


def vocab_chunk_of(config: ModelConfig) -> int | None:
    """Vocabulary chunk size of the fused head, or None to use the model's own head."""
    if config.fused_lm_head_chunk_size == "disabled":
        return None
    return AUTO_VOCAB_CHUNK if config.fused_lm_head_chunk_size == "auto" else config.fused_lm_head_chunk_size


@dataclass(frozen=True, slots=True)
class Scored:
    """What the model says of a row of T tokens."""

    logprobs: Tensor
    """float32 [T]"""
    entropy: Tensor
    """float32 [T]"""
    divergence_M: Tensor
    """From the row's teachers at its trained tokens; zeros unless asked for."""
    of_sampler_PK: Tensor | None
    """Log-probabilities of the sampler's likeliest tokens at each target. None if the row does not have them."""


def score_row(
    model: PreTrainedModel, row: Row, targets: Tensor, vocab_chunk: int | None, trains_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the tokens at the indices `targets`; both float32 [T].

    Log-probabilities have a gradient, entropies only with `trains_entropy`.

    Entry t belongs to token t, which the model predicts at t - 1 with the temperature of t - 1. Entries that are not
    targets have the values of a uniform distribution.
    `targets` must not contain 0, which nothing predicts.
    """
    scored = score_whole(model, row, targets, vocab_chunk, trains_entropy)
    return scored.logprobs, scored.entropy


def score_whole(
    model: PreTrainedModel,
    row: Row,
    targets: Tensor,
    vocab_chunk: int | None,
    trains_entropy: bool = False,
    beta: float | None = None,
) -> Scored:
    """What `score_row` returns, and with `beta` the divergences from the row's teachers. The tokens of a row with
    divergences cannot be divided: the config refuses `model.cp` and `model.tp` with them."""
    vocab_size = model.config.get_text_config().vocab_size
    tops = None if beta is None else row.teacher_top
    places = targets if tops is None else torch.cat((targets, row.layout.trained_M))

    def score(
        hidden: Tensor, logits_of: LogitsOf, labels: Tensor, temperatures: Tensor, *sampler: Tensor
    ) -> tuple[Tensor, ...]:
        count = len(labels) if tops is None else len(targets)
        inputs = (hidden[:count], labels[:count], temperatures[:count])
        scored: tuple[Tensor, ...]
        if sampler:
            ids, is_support = (each[:count] for each in sampler)
            scored = logprobs_beside_sampler(model, inputs, ids, is_support, logits_of, trains_entropy)
        else:
            scored = logprobs_and_entropies(model, *inputs, logits_of, vocab_chunk, trains_entropy)
        if beta is None or tops is None:
            return torch.zeros_like(scored[0]), *scored
        return divergences(hidden[count:], logits_of, tops, beta, vocab_size), *scored

    # A token is predicted at the one before.
    given = [row.input_ids[places], row.temperatures[places - 1]]
    if row.sampler_top is not None:
        given += row.sampler_top.at(places, row.layout, len(row.input_ids))
    with replaying(model, row.routed_experts), seeing(model, None if row.images is None else row.images()):
        divergence, own, own_entropy, *of_sampler = score_tokens(
            model, row.input_ids[None], row.position_ids[None], score, places - 1, given, uses_last=False
        )
    log_vocab = math.log(vocab_size)
    logprobs = torch.full_like(row.temperatures, -log_vocab).index_put((targets,), own)
    entropy = torch.full_like(row.temperatures, log_vocab).index_put((targets,), own_entropy)
    return Scored(logprobs, entropy, divergence, of_sampler[0] if of_sampler else None)
