"""Fused linear heads: cross-entropy, or log-probabilities and entropies, without all `[tokens, vocabulary]` logits.

`linear_cross_entropy_sum` (SFT) iterates over chunks of tokens and computes each logit only once: gradients are
computed together with the loss. Each chunk adds to the float32 gradient of the whole weight, which takes longer than
the chunk's product if it has few tokens. So a chunk has at least as many tokens as hidden channels: its logits are then
as many as the weights, and take half of the memory of that sum.

`fused_logprobs` (RL) iterates over slices of the vocabulary, in both passes. Per token, the forward pass keeps the
running maximum m, the sum of exponentials Z = sum exp(z - m) and the sum of exp(z - m) * z (an online softmax), which
give logprob = z_label - log Z - m and entropy = m + log Z - E[z]. The backward pass recomputes each slice's logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prime_rl.configs.data import TokenLoss
from prime_rl.trainer.kernels.products import Product, plain_product
from prime_rl.trainer.optim.optimizer import KeptGradient, kept_gradient_of


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """Chunk sizes of a head's computation, which bound its memory."""

    logits: int = 2**25
    """Maximum number of logits, or their gradients, in memory, in the compute dtype: 64 MiB in bfloat16."""
    float_logits: int = 2**22
    """Maximum number of float32 logits of a linear head in memory: 16 MiB."""
    cached_float_logits: int = 2**20
    """The same limit on a CPU: 4 MiB, which fits in its caches. On a GPU, so many small operations would be slow."""
    vocab_chunk: int = 2048
    """Number of vocabulary rows whose gradient is added to a sum at a time."""

    def rows(self, weight_VH: Tensor, trains_weight: bool) -> int:
        """Number of tokens of a chunk."""
        return max(1, self.logits // len(weight_VH), weight_VH.shape[1] if trains_weight else 0)

    def float_rows(self, width: int, on_cpu: bool) -> int:
        """Number of rows of `width` logits to hold in float32 at a time."""
        return max(1, (min(self.float_logits, self.cached_float_logits) if on_cpu else self.float_logits) // width)


CHUNK_SIZES = ChunkSizes()


def token_weights(losses_N: Tensor, kind: TokenLoss) -> Tensor | None:
    """The weights of tokens with these cross-entropies, without gradient. None: all have 1."""
    if kind == "cross_entropy":
        return None
    probability_N = losses_N.detach().neg().exp()
    return probability_N if kind == "dft" else probability_N * (1 - probability_N)


def linear_cross_entropy_sum(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    limits: ChunkSizes = CHUNK_SIZES,
    product: Product = plain_product,
    kind: TokenLoss = "cross_entropy",
) -> Tensor:
    """Sum over N tokens of the cross-entropy of `hidden @ weight.T`, in float32. `product` computes `a @ b.T`.

    Gradients are computed together with the loss, so that the backward pass recomputes no logits. A frozen weight has
    none.
    """
    kept = kept_gradient_of(weight_VH)
    if not torch.is_grad_enabled():
        hidden_NH, weight_VH = hidden_NH.detach(), weight_VH.detach()
    return _LinearCrossEntropy.apply(hidden_NH, weight_VH, targets_N, kept, _Options(limits, product, kind))


@dataclass(frozen=True, slots=True)
class _Options:
    limits: ChunkSizes
    product: Product
    kind: TokenLoss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        kept: KeptGradient | None,
        options: _Options,
    ) -> Tensor:
        limits, product = options.limits, options.product
        trains_weight = ctx.needs_input_grad[1]
        rows = limits.rows(weight, trains_weight)
        # With a single chunk, saving the gradient of the logits takes no more memory than saving the weight gradient,
        # which the backward pass can then add directly to the kept one.
        is_added_later = kept is not None and len(targets) <= rows
        is_trained = any(ctx.needs_input_grad)
        grad_hidden = torch.empty_like(hidden) if is_trained else None
        grad_weight = logits = None
        if trains_weight and len(targets) > rows:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        loss = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(targets), rows):
            chunk = slice(start, start + rows)
            logits = None  # freed before the next ones are computed
            logits = product(hidden[chunk], weight)
            loss += _loss_in_place(logits, targets[chunk], is_trained, limits, options.kind)
            if grad_hidden is None:
                continue
            # They are the gradient by now. Another name for them would keep them beside the next ones.
            grad_hidden[chunk] = product(logits, weight.t())
            if grad_weight is not None:
                _add_weight_gradient(grad_weight, logits, hidden[chunk], product, limits.vocab_chunk)
            elif trains_weight and not is_added_later:
                grad_weight = product(logits.t(), hidden.t())  # a single chunk needs no float32 sum
        if len(targets) == 0 and ctx.needs_input_grad[1] and not is_added_later:
            # Other processes have a gradient, and all reduce theirs together.
            grad_weight = torch.zeros_like(weight)
        ctx.save_for_backward(grad_hidden, grad_weight, *((logits, hidden) if is_added_later else (None, None)))
        ctx.weight_dtype, ctx.kept, ctx.vocab_chunk, ctx.product = weight.dtype, kept, limits.vocab_chunk, product
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_logits, hidden = ctx.saved_tensors
        # In place, because the weight gradient is as large as the embedding.
        grad_hidden.mul_(grad)
        if not ctx.needs_input_grad[1]:
            return grad_hidden, None, None, None, None
        if ctx.kept is None:
            return grad_hidden, grad_weight.mul_(grad).to(ctx.weight_dtype), None, None, None
        place, scale = ctx.kept.place(), float(grad)
        if grad_logits is None:
            place.add_(grad_weight, alpha=scale)
        else:
            _add_weight_gradient(place, grad_logits, hidden, ctx.product, ctx.vocab_chunk, scale)
        return grad_hidden, None, None, None, None


def _add_weight_gradient(
    sum_VH: Tensor, grad_logits_NV: Tensor, hidden_NH: Tensor, product: Product, vocab_chunk: int, scale: float = 1.0
) -> None:
    """Add `scale * grad_logits.T @ hidden`, part by part of the vocabulary, which bounds the temporary memory."""
    for part, own in zip(sum_VH.split(vocab_chunk), grad_logits_NV.split(vocab_chunk, dim=1), strict=True):
        if product is plain_product and own.dtype == part.dtype:
            part.addmm_(own.t(), hidden_NH, alpha=scale)
        else:
            part.add_(product(own.t(), hidden_NH.t()), alpha=scale)


def _loss_in_place(
    logits_NV: Tensor, targets_N: Tensor, is_trained: bool, limits: ChunkSizes, kind: TokenLoss
) -> Tensor:
    """The summed loss. If `is_trained`, its gradient replaces the logits, in the compute dtype."""
    rows = limits.float_rows(logits_NV.shape[1], on_cpu=logits_NV.device.type == "cpu")
    loss = logits_NV.new_zeros((), dtype=torch.float32)
    for start in range(0, len(targets_N), rows):
        part = slice(start, start + rows)
        values, picked = logits_NV[part].float(), targets_N[part, None]
        peak, own = values.amax(1, keepdim=True), values.gather(1, picked)
        # Each logit's exponential is used for both the loss and the gradient.
        total = values.sub_(peak).exp_().sum(1, keepdim=True)
        losses = peak + total.log() - own
        weights = token_weights(losses, kind)
        loss += (losses if weights is None else losses * weights).sum()
        if is_trained:
            grad_logits = values.div_(total)
            grad_logits.scatter_add_(1, picked, -torch.ones_like(total))
            if weights is not None:
                grad_logits.mul_(weights)
            logits_NV[part] = grad_logits
    return loss


def fused_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperatures: Tensor,
    vocab_chunk: int,
    product: Product = plain_product,
) -> tuple[Tensor, Tensor]:
    """Log-probability of `labels` under softmax(hidden @ weight.T / temperature), and entropy of that distribution.

    Args:
        hidden: [N, H].
        weight: [V, H], weight of a head without bias.
        labels: [N], token ids.
        temperatures: [N], float32, greater than 0.
        vocab_chunk: vocabulary entries per slice.
        product: computes `a @ b.T`.

    Returns:
        Log-probabilities and entropies, float32 [N] each.
    """
    return _FusedLogprobs.apply(hidden, weight, labels, temperatures, vocab_chunk, product)


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperatures: Tensor,
        vocab_chunk: int,
        product: Product,
    ) -> tuple[Tensor, Tensor]:
        inverse_temperatures = temperatures.float().reciprocal()[:, None]
        peak = torch.full_like(temperatures, -torch.inf, dtype=torch.float32)
        total = torch.zeros_like(peak)
        weighted = torch.zeros_like(peak)
        label_logits = torch.zeros_like(peak)
        for start in range(0, weight.shape[0], vocab_chunk):
            logits = product(hidden, weight[start : start + vocab_chunk]).float() * inverse_temperatures
            new_peak = torch.maximum(peak, logits.amax(-1))
            shrink = (peak - new_peak).exp()
            exponentials = (logits - new_peak[:, None]).exp()
            total = total * shrink + exponentials.sum(-1)
            weighted = weighted * shrink + (exponentials * logits).sum(-1)
            peak = new_peak
            inside, column = _labels_in_slice(labels, start, logits.shape[1])
            label_logits = torch.where(inside, logits.gather(1, column[:, None]).squeeze(1), label_logits)
        log_partition = peak + total.log()
        entropy = log_partition - weighted / total
        ctx.save_for_backward(hidden, weight, labels, inverse_temperatures, log_partition, entropy)
        ctx.vocab_chunk, ctx.product = vocab_chunk, product
        ctx.set_materialize_grads(False)  # an entropy that nothing uses costs nothing
        return label_logits - log_partition, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, inverse_temperatures, log_partition, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, weight.shape[0], ctx.vocab_chunk):
            weight_slice = weight[start : start + ctx.vocab_chunk]
            logits = ctx.product(hidden, weight_slice).float() * inverse_temperatures
            inside, column = _labels_in_slice(labels, start, logits.shape[1])
            log_probabilities = logits - log_partition[:, None]
            # With probabilities p and entropy H: d logprob / dz = [z is the label] - p, and dH / dz = -p (log p + H).
            grad_logits = log_probabilities.exp().neg_()
            grad_logits.scatter_add_(1, column[:, None], inside[:, None].float())
            grad_logits = grad_logits * (grad_logprobs[:, None] * inverse_temperatures)
            if grad_entropy is not None:
                surprise = log_probabilities.exp() * (log_probabilities + entropy[:, None])
                grad_logits -= surprise * (grad_entropy[:, None] * inverse_temperatures)
            grad_logits = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden += ctx.product(grad_logits, weight_slice.T)
            if grad_weight is not None:
                grad_weight[start : start + ctx.vocab_chunk] = ctx.product(grad_logits.T, hidden.T)
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None


def _labels_in_slice(labels: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Whether each label is in a vocabulary slice, and its column in the slice (0 if it is not), both [N]."""
    inside = (labels >= start) & (labels < start + width)
    return inside, torch.where(inside, labels - start, 0)
