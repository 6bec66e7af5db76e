"""Packed rows as tensors, and the model's log-probabilities and entropies for their tokens."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from prime_rl.configs.trainer import ModelConfig
from prime_rl.trainer.kernels.fused_logprobs import fused_logprobs
from prime_rl.trainer.kernels.lean_linear import head_product
from prime_rl.trainer.model.scoring import LogitsOf, is_plain, logit_scale, score_tokens
from prime_rl.trainer.rl.loss import sequence_lengths
from prime_rl.trainer.rl.sequences import RowLayout
from prime_rl.transport.messages import MicroBatch
from prime_rl.transport.to_device import to_device

AUTO_VOCAB_CHUNK = 8192
MAX_LOGITS = 2**25
"""Maximum number of logits in memory with an unfused head: 128 MiB in float32."""


@dataclass(frozen=True, slots=True)
class Row:
    """A packed row of T tokens in one or more sequences. Tensors are [T] and on the model's device."""

    layout: RowLayout
    input_ids: Tensor
    position_ids: Tensor
    """On the host, for `score_tokens`."""
    loss_mask: Tensor
    advantages: Tensor
    inference_logprobs: Tensor
    temperatures: Tensor
    teacher_logprobs: Tensor | None
    versions: Tensor
    """Oldest policy version that sampled the token's sequence; -1 if unknown."""
    minibatch: int = 0
    """Index of the optimizer update within the step that this row belongs to."""
    proximal_logprobs: Tensor | None = None
    """Log-probabilities under the policy at the start of the step; None if the loss does not need them."""
    kept_as: list[list[int] | None] | None = None
    """For each sequence, the kept rollout that it belongs to, as in `TrainingSample`. None if no sequence is kept."""

    @classmethod
    def from_message(cls, message: MicroBatch, device: torch.device) -> Row:
        def floats(values: list[float]) -> Tensor:
            return to_device(torch.tensor(values, dtype=torch.float32), device)

        # Counted on the host, to avoid synchronizing with the GPU.
        position_ids, loss_mask = torch.tensor(message.position_ids), torch.tensor(message.loss_mask, dtype=torch.bool)
        return cls(
            layout=RowLayout.of_mask(loss_mask, sequence_lengths(position_ids), device),
            input_ids=to_device(torch.tensor(message.input_ids), device),
            position_ids=position_ids,
            loss_mask=to_device(loss_mask, device),
            advantages=floats(message.advantages),
            inference_logprobs=floats(message.inference_logprobs),
            temperatures=floats(message.temperatures),
            teacher_logprobs=None if message.teacher_logprobs is None else floats(message.teacher_logprobs),
            versions=to_device(torch.tensor(message.versions or [-1] * len(message.input_ids)), device),
            minibatch=message.minibatch,
            kept_as=message.kept_as,
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


def vocab_chunk_of(config: ModelConfig) -> int | None:
    """Vocabulary chunk size of the fused head, or None to use the model's own head."""
    if config.fused_lm_head_chunk_size == "disabled":
        return None
    return AUTO_VOCAB_CHUNK if config.fused_lm_head_chunk_size == "auto" else config.fused_lm_head_chunk_size


def score_row(model: PreTrainedModel, row: Row, targets: Tensor, vocab_chunk: int | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities (with gradient) and entropies of the tokens at the indices `targets`; both float32 [T].

    Entry t belongs to token t, which the model predicts at t - 1 with the temperature of t - 1. Entries that are not
    targets have the values of a uniform distribution.
    `targets` must not contain 0, which nothing predicts.
    """
    labels, temperatures = row.input_ids[targets], row.temperatures[targets - 1]

    def score(hidden: Tensor, logits_of: LogitsOf) -> tuple[Tensor, Tensor]:
        hidden = hidden[targets - 1]
        head = model.get_output_embeddings()
        if vocab_chunk is not None and has_plain_logits(head, model):
            product = head_product(head)
            return fused_logprobs(hidden, head.weight, labels, temperatures, vocab_chunk, product)
        return plain_logprobs(hidden, logits_of, labels, temperatures, model.config.vocab_size)

    scored, scored_entropy = score_tokens(model, row.input_ids[None], row.position_ids[None], score, uses_last=False)
    log_vocab = math.log(model.config.vocab_size)
    logprobs = torch.full_like(row.temperatures, -log_vocab).index_put((targets,), scored)
    entropy = torch.full_like(row.temperatures, log_vocab).index_put((targets,), scored_entropy)
    return logprobs, entropy


def has_plain_logits(head: nn.Module, model: PreTrainedModel) -> bool:
    """Whether logits are just hidden states times the head's weight, as the fused head computes them."""
    is_changed = getattr(model.config, "final_logit_softcapping", None) is not None or logit_scale(model) != 1
    return isinstance(head, nn.Linear) and is_plain(head) and not is_changed


def plain_logprobs(
    hidden: Tensor, logits_of: LogitsOf, labels: Tensor, temperatures: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, [N] each, from the model's own logits, in chunks of tokens.

    Used for heads with a bias, a scale, a soft cap or an adapter.
    """
    chunk_logprobs = functools.partial(_chunk_logprobs, logits_of)
    chunk = max(1, MAX_LOGITS // vocab_size)
    if len(labels) <= chunk:
        return chunk_logprobs(hidden, labels, temperatures)
    chunks = zip(hidden.split(chunk), labels.split(chunk), temperatures.split(chunk), strict=True)
    scored = (checkpoint(chunk_logprobs, *inputs, use_reentrant=False) for inputs in chunks)
    logprobs, entropies = zip(*scored, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(logits_of: LogitsOf, hidden: Tensor, labels: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    log_softmax = torch.log_softmax(logits_of(hidden).float() / temperatures[:, None], dim=-1)
    with torch.no_grad():
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return -nn.functional.nll_loss(log_softmax, labels, reduction="none"), entropy
