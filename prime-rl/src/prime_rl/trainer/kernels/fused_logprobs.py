"""Log-probabilities and entropies of given tokens, computed without materializing `[tokens, vocabulary]` logits.

Both passes iterate over slices of the vocabulary. Per token, the forward pass keeps the running maximum m, the sum of
exponentials Z = sum exp(z - m) and the sum of exp(z - m) * z (an online softmax), which give
logprob = z_label - log Z - m and entropy = m + log Z - E[z]. The backward pass recomputes each slice's logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prime_rl.trainer.kernels.float32_products import Product
from prime_rl.trainer.kernels.lean_linear import plain_product


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
        Log-probabilities and entropies, float32 [N] each. The entropies have no gradient.
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
        ctx.save_for_backward(hidden, weight, labels, inverse_temperatures, log_partition)
        ctx.vocab_chunk, ctx.product = vocab_chunk, product
        ctx.mark_non_differentiable(entropy)
        return label_logits - log_partition, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, _grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, inverse_temperatures, log_partition = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, weight.shape[0], ctx.vocab_chunk):
            weight_slice = weight[start : start + ctx.vocab_chunk]
            logits = ctx.product(hidden, weight_slice).float() * inverse_temperatures
            inside, column = _labels_in_slice(labels, start, logits.shape[1])
            grad_logits = (logits - log_partition[:, None]).exp().neg_()
            grad_logits.scatter_add_(1, column[:, None], inside[:, None].float())
            grad_logits = (grad_logits * (grad_logprobs[:, None] * inverse_temperatures)).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden += ctx.product(grad_logits, weight_slice.T)
            if grad_weight is not None:
                grad_weight[start : start + ctx.vocab_chunk] = ctx.product(grad_logits.T, hidden.T)
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None


def _labels_in_slice(labels: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Whether each label is in a vocabulary slice, and its column in the slice (0 if it is not), both [N]."""
    inside = (labels >= start) & (labels < start + width)
    return inside, torch.where(inside, labels - start, 0)
