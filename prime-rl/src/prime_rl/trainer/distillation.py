"""Generalized Jensen-Shannon divergence from a teacher that gives its likeliest tokens, and the rest as one outcome.

GKD (Agarwal et al. 2024, On-Policy Distillation of Language Models) minimises, for the teacher's distribution p and
the trained model's q of the next token,

    beta = 0:  KL(p || q)                                        forward KL
    beta = 1:  KL(q || p)                                        reverse KL
    else:      beta * KL(p || m) + (1 - beta) * KL(q || m),  m = beta * p + (1 - beta) * q

A server gives only the k likeliest tokens of p. All other tokens are then one outcome, whose probability is what the k
leave: 1 - sum(p). q is grouped in the same way. Merging outcomes never raises a divergence (data processing), so this
is a lower bound of the whole one. It is equal with k = vocabulary, and nothing is claimed about how p divides the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from prime_rl.trainer.model.scoring import MAX_LOGITS, LogitsOf

MIN_REST = 1e-7
"""Least probability of the teacher's other tokens. Rounding in float32 could make it 0, and the reverse KL infinite."""
MIN_LOGPROB = -100.0


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The k likeliest tokens of each of n teachers at M places."""

    ids_MNK: Tensor
    logprobs_MNK: Tensor
    """At temperature 1."""
    weights_MN: Tensor
    """Weight of each teacher. 0 for places that fewer teachers score."""


def generalized_jsd(logits_NV: Tensor, ids_NK: Tensor, teacher_NK: Tensor, beta: float) -> Tensor:
    """The divergence at each of N places, [N]. `teacher_NK` are log-probabilities; the logits have a gradient."""
    log_norm = logits_NV.logsumexp(-1, keepdim=True)
    student, teacher = logits_NV.gather(1, ids_NK) - log_norm, teacher_NK.clamp(min=MIN_LOGPROB)
    if ids_NK.shape[1] < logits_NV.shape[1]:
        # Summed over the other tokens: 1 - sum(q) would cancel where the k hold nearly all of q.
        others = logits_NV.scatter(1, ids_NK, -torch.inf).logsumexp(-1, keepdim=True) - log_norm
        rest = (1 - teacher.exp().sum(-1, keepdim=True)).clamp(min=MIN_REST).log()
        student, teacher = torch.cat([student, others], 1), torch.cat([teacher, rest], 1)
    if beta == 0:
        return (teacher.exp() * (teacher - student)).sum(-1)
    if beta == 1:
        return (student.exp() * (student - teacher)).sum(-1)
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    of_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
    of_student = (student.exp() * (student - mixture)).sum(-1)
    return beta * of_teacher + (1 - beta) * of_student


def divergences(hidden_MH: Tensor, logits_of: LogitsOf, top: TopTokens, beta: float, vocab_size: int) -> Tensor:
    """The weighted sum of the divergences from all teachers, float32 [M]. Call it inside of `score_tokens`.

    At most `MAX_LOGITS` logits are in memory: those of some tokens at a time, which the backward pass computes again.
    """

    def of_chunk(hidden: Tensor, ids: Tensor, logprobs: Tensor, weights: Tensor) -> Tensor:
        logits = logits_of(hidden).float()
        each = [generalized_jsd(logits, ids[:, n], logprobs[:, n], beta) for n in range(ids.shape[1])]
        return (torch.stack(each, 1) * weights).sum(1)

    inputs = (hidden_MH, top.ids_MNK, top.logprobs_MNK, top.weights_MN)
    chunk = max(1, MAX_LOGITS // vocab_size)
    if len(hidden_MH) <= chunk:
        return of_chunk(*inputs)
    chunks = zip(*(values.split(chunk) for values in inputs), strict=True)
    return torch.cat([checkpoint(of_chunk, *each, use_reentrant=False) for each in chunks])


def likeliest_tokens(hidden_MH: Tensor, logits_of: LogitsOf, k: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities [M, k] of the likeliest tokens. Call it inside of `score_tokens`, without gradient.

    At most `MAX_LOGITS` logits are in memory."""
    chunks = hidden_MH.split(max(1, MAX_LOGITS // vocab_size))
    ids, logprobs = zip(*(top_of_logits(logits_of(hidden), k) for hidden in chunks), strict=True)
    return torch.cat(ids), torch.cat(logprobs)


def top_of_logits(logits_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities [N, k] of the likeliest tokens, as a server answers them."""
    logprobs, ids = logits_NV.float().log_softmax(-1).topk(min(k, logits_NV.shape[-1]), -1)
    return ids, logprobs
