"""Samples the next token of every sequence in a batch at once.

Shapes: R sequences, V tokens in the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from prime_rl.inference.embedded.engine.generation import PromptLogprob, SamplingParams, Sequence, TopLogprobs


@dataclass(frozen=True, slots=True)
class Drawn:
    """The sampled tokens with their log-probabilities under the processed distribution, and the top-k if requested."""

    tokens: list[int]
    logprobs: list[float]
    top: list[TopLogprobs] | None


@dataclass(frozen=True, slots=True)
class _Bias:
    """Logit bias: adds `values[i]` to the logit of `tokens[i]` in `rows[i]`. Pairs of row and token are unique."""

    rows: Tensor
    tokens: Tensor
    values: Tensor

    @classmethod
    def from_params(cls, params: SequenceOf[SamplingParams], device: torch.device) -> _Bias | None:
        entries = [(row, *entry) for row, p in enumerate(params) for entry in p.logit_bias]
        if not entries:
            return None
        rows, tokens, values = zip(*entries, strict=True)
        return cls(
            torch.tensor(rows, device=device), torch.tensor(tokens, device=device), torch.tensor(values).to(device)
        )


class BatchSampler:
    """Samples from R sequences, whose sampling parameters it holds as tensors.

    Processes logits in vLLM's order: logit bias, minimum length, penalties, temperature, min-p, top-k, top-p. Greedy
    rows take the most likely token and report log-probabilities at temperature 1 without truncation.
    """

    def __init__(self, params: SequenceOf[SamplingParams], device: torch.device) -> None:
        self.params = list(params)
        self.device = device
        self.greedy = self._column([p.greedy for p in params]) if any(p.greedy for p in params) else None
        self.temperature = self._optional([p.temperature or 1.0 for p in params], neutral=1.0)
        self.min_p = self._optional([0.0 if p.greedy else p.min_p for p in params], neutral=0.0)
        self.top_k = self._optional([0 if p.greedy else p.top_k for p in params], neutral=0)
        self.top_p = self._optional([1.0 if p.greedy else p.top_p for p in params], neutral=1.0)
        self.bias = _Bias.from_params(params, device)
        self.penalised = [row for row, p in enumerate(params) if p.penalised]
        self.delayed = [row for row, p in enumerate(params) if p.min_tokens > 0 and p.stop_token_ids]
        self.num_top = max(p.top_logprobs for p in params)

    def fits(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether the tensors were built for exactly these sequences, in this order."""
        return len(sequences) == len(self.params) and all(
            sequence.params is params for sequence, params in zip(sequences, self.params, strict=True)
        )

    def draw(self, logits_RV: Tensor, sequences: SequenceOf[Sequence]) -> Drawn:
        """Sample one token per row. Each sequence uses its own generator, so results do not depend on the batch."""
        logits = self._process(logits_RV.float(), sequences)
        peak = logits.amax(-1, keepdim=True)
        weights = (logits - peak).exp_()
        uniforms = self._column([sequence.rng.random() for sequence in sequences], logits.dtype)
        cdf = weights.cumsum(-1)
        chosen = _inverse_cdf(cdf, uniforms)
        if self.greedy is not None:
            chosen = torch.where(self.greedy, logits.argmax(-1, keepdim=True), chosen)
        log_norm = peak + cdf[:, -1:].log()
        logprobs = logits.gather(1, chosen) - log_norm
        top = _top(logits - log_norm, self.num_top) if self.num_top else None
        return Drawn(chosen.squeeze(1).tolist(), logprobs.squeeze(1).tolist(), top)

    def _process(self, logits: Tensor, sequences: SequenceOf[Sequence]) -> Tensor:
        if self.bias is not None or self.penalised or self.delayed:
            logits = logits.clone()
        if self.bias is not None:
            logits[self.bias.rows, self.bias.tokens] += self.bias.values
        for row in self.delayed:
            if sequences[row].num_generated < self.params[row].min_tokens:
                logits[row, list(self.params[row].stop_token_ids)] = -torch.inf
        for row in self.penalised:
            _penalise(logits[row], sequences[row])
        if self.temperature is not None:
            logits = logits / self.temperature
        if self.min_p is not None:
            logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + self.min_p.log(), -torch.inf)
        if self.top_k is not None or self.top_p is not None:
            logits = self._truncate(logits)
        return logits

    def _truncate(self, logits: Tensor) -> Tensor:
        """Keep the top k tokens, then the smallest set of those with mass at least p. Ties at the cutoff are kept."""
        ordered = logits.sort(-1, descending=True).values
        rank = torch.arange(ordered.shape[-1], device=self.device)
        if self.top_k is not None:
            ordered = ordered.masked_fill((self.top_k > 0) & (rank >= self.top_k), -torch.inf)
        if self.top_p is not None:
            mass = ordered.softmax(-1)
            # The most likely token stays, also if top_p is too small for float32 and becomes 0.
            ordered = ordered.masked_fill((mass.cumsum(-1) - mass >= self.top_p) & (rank > 0), -torch.inf)
        lowest_kept = ordered.masked_fill(ordered == -torch.inf, torch.inf).amin(-1, keepdim=True)
        return logits.masked_fill(logits < lowest_kept, -torch.inf)

    def _column(self, values: SequenceOf[float], dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device).unsqueeze(1)

    def _optional(self, values: SequenceOf[float], neutral: float) -> Tensor | None:
        return None if all(value == neutral for value in values) else self._column(values)


def prompt_logprobs(logits_LV: Tensor, prompt: SequenceOf[int], num_top: int) -> list[PromptLogprob]:
    """Log-probabilities of `prompt[1:]` from the logits [L, V] of `prompt[:-1]`, at temperature 1, not truncated."""
    logprobs = logits_LV.float().log_softmax(-1)
    targets = torch.tensor(prompt[1:], device=logits_LV.device).unsqueeze(1)
    own = logprobs.gather(1, targets)
    ranks = ((logprobs > own).sum(-1) + 1).tolist()
    tops = _top(logprobs, num_top) if num_top else [[] for _ in ranks]
    return [PromptLogprob(*row) for row in zip(prompt[1:], own.squeeze(1).tolist(), ranks, tops, strict=True)]


def _inverse_cdf(cdf: Tensor, uniforms: Tensor) -> Tensor:
    """Return the index of the first token whose cumulative weight exceeds `uniform * total`, [R, 1].

    Uses one binary search, because `torch.multinomial` is 40 times slower on a CPU. Rounding can make the target equal
    to the total; clamping to the last token with positive weight ensures that tokens of weight 0 are never chosen.
    """
    total = cdf[:, -1:].contiguous()
    chosen = torch.searchsorted(cdf, uniforms * total, right=True)
    last = torch.searchsorted(cdf, total)
    return torch.minimum(chosen, last).clamp_(max=cdf.shape[-1] - 1)


def _top(logprobs: Tensor, count: int) -> list[TopLogprobs]:
    values, tokens = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True)]


def _penalise(logits_V: Tensor, sequence: Sequence) -> None:
    """Apply repetition penalty (over prompt and completion), presence and frequency penalties (over the completion).

    As in vLLM, the repetition penalty divides positive logits and multiplies negative ones. Works in place.
    """
    params = sequence.params
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(sequence.tokens)), device=logits_V.device)
        values = logits_V[seen]
        logits_V[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    generated = Counter(sequence.tokens[len(sequence.request.prompt) :])
    if generated and (params.presence_penalty or params.frequency_penalty):
        tokens = torch.tensor(list(generated), device=logits_V.device)
        counts = torch.tensor(list(generated.values()), device=logits_V.device)
        logits_V[tokens] -= params.presence_penalty + params.frequency_penalty * counts
