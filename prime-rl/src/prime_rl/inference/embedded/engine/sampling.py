"""Samples the next token of every sequence in a batch at once.

Shapes: R sequences, V tokens in the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from prime_rl.inference.embedded.engine.generation import PromptLogprob, SamplingParams, Sequence, TopLogprobs
from prime_rl.inference.embedded.engine.tensors import on_device

_CACHED_LOGITS = 1 << 18
"""A CPU samples rows of at most this many logits at once. For larger intermediate results, of more than 1 MiB, the
system would zero new pages."""

_BLOCK = 256
"""Weights of a large vocabulary are summed in blocks of this many."""
_ONE_LEVEL = 4096
"""The largest vocabulary for which blocks do not pay."""


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
        return cls(on_device(rows, device), on_device(tokens, device), on_device(values, device))


class BatchSampler:
    """Samples the next token of R sequences. On a CPU, it samples a few rows at a time to keep results in the cache."""

    def __init__(self, params: SequenceOf[SamplingParams], vocab_size: int, device: torch.device) -> None:
        at_once = max(1, _CACHED_LOGITS // vocab_size) if device.type == "cpu" else len(params)
        self._starts = range(0, len(params), at_once)
        self._parts = [_PartSampler(params[start : start + at_once], device) for start in self._starts]

    def fits(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether this sampler was built for exactly these sequences, in this order."""
        params = [params for part in self._parts for params in part.params]
        return len(sequences) == len(params) and all(
            sequence.params is own for sequence, own in zip(sequences, params, strict=True)
        )

    def draw(self, logits_RV: Tensor, sequences: SequenceOf[Sequence]) -> Drawn:
        """Sample one token per row. Each sequence uses its own generator, so results do not depend on the batch."""
        drawn = Drawn([], [], [] if any(part.num_top for part in self._parts) else None)
        for start, part in zip(self._starts, self._parts, strict=True):
            rows = slice(start, start + len(part.params))
            tokens, logprobs, top = part.draw(logits_RV[rows], sequences[rows])
            drawn.tokens.extend(tokens)
            drawn.logprobs.extend(logprobs)
            if drawn.top is not None:
                drawn.top.extend(top or [[] for _ in tokens])
        return drawn


class _PartSampler:
    """Holds the sampling parameters of R sequences as tensors.

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
        self.delayed = [
            (row, on_device(list(p.stop_token_ids), device))
            for row, p in enumerate(params)
            if p.min_tokens > 0 and p.stop_token_ids
        ]
        """Rows that may not stop yet, and the tokens that would stop them."""
        self.num_top = max(p.top_logprobs for p in params)

    def draw(
        self, logits_RV: Tensor, sequences: SequenceOf[Sequence]
    ) -> tuple[list[int], list[float], list[TopLogprobs] | None]:
        """The tokens, their log-probabilities and, if any sequence wants them, the most likely tokens."""
        logits = self._process(logits_RV.float(), sequences)
        uniforms = self._column([sequence.rng.random() for sequence in sequences], logits.dtype)
        drawn, normalized = self._choose(logits, uniforms)
        # One copy to the host, because each waits for the device. A token is exact in float64.
        tokens, logprobs = drawn.tolist()
        top = _top(normalized, self.num_top) if normalized is not None else None
        return [int(token) for token in tokens], logprobs, top

    def _choose(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens and log-probabilities [2, R] in float64, and all log-probabilities [R, V] if some are wanted.

        Nothing here waits for the device.
        """
        peak = logits.amax(-1, keepdim=True)
        chosen, total = _draw_by_weight((logits - peak).exp_(), uniforms)
        if self.greedy is not None:
            chosen = torch.where(self.greedy, logits.argmax(-1, keepdim=True), chosen)
        log_norm = peak + total.log()
        logprobs = logits.gather(1, chosen) - log_norm
        drawn = torch.cat((chosen.double(), logprobs.double()), 1).t()
        return drawn, logits - log_norm if self.num_top else None

    def _process(self, logits: Tensor, sequences: SequenceOf[Sequence]) -> Tensor:
        if self.bias is not None or self.penalised or self.delayed:
            logits = logits.clone()
        if self.bias is not None:
            logits[self.bias.rows, self.bias.tokens] += self.bias.values
        for row, stops in self.delayed:
            if sequences[row].num_generated < self.params[row].min_tokens:
                logits[row].index_fill_(0, stops, -torch.inf)
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
        """Keep the top k tokens, then the smallest set of those with mass at least p. Of equal ones, the first."""
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(ordered.shape[-1], device=self.device)
        if self.top_k is not None:
            ordered = ordered.masked_fill((self.top_k > 0) & (rank >= self.top_k), -torch.inf)
        if self.top_p is not None:
            mass = ordered.softmax(-1)
            # The most likely token stays, also if top_p is too small for float32 and becomes 0.
            ordered = ordered.masked_fill((mass.cumsum(-1) - mass >= self.top_p) & (rank > 0), -torch.inf)
        return torch.empty_like(logits).scatter_(-1, order, ordered)

    def _column(self, values: SequenceOf[float], dtype: torch.dtype | None = None) -> Tensor:
        return on_device(values, self.device, dtype).unsqueeze(1)

    def _optional(self, values: SequenceOf[float], neutral: float) -> Tensor | None:
        return None if all(value == neutral for value in values) else self._column(values)


def prompt_logprobs(parts: Iterable[Tensor], prompt: SequenceOf[int], num_top: int) -> list[PromptLogprob]:
    """Log-probabilities of `prompt[1:]` at temperature 1, not truncated, from parts of the logits [L, V] of
    `prompt[:-1]` and perhaps of tokens after it."""
    found: list[PromptLogprob] = []
    for logits_LV in parts:
        targets = prompt[1 + len(found) : 1 + len(found) + len(logits_LV)]
        if not targets:
            break
        found += _scored(logits_LV[: len(targets)], targets, num_top)
    return found


def _scored(logits_LV: Tensor, targets: SequenceOf[int], num_top: int) -> list[PromptLogprob]:
    logprobs = logits_LV.float().log_softmax(-1)
    own = logprobs.gather(1, on_device(targets, logits_LV.device, torch.long).unsqueeze(1))
    ranks = ((logprobs > own).sum(-1) + 1).tolist()
    tops = _top(logprobs, num_top) if num_top else [[] for _ in ranks]
    return [PromptLogprob(*row) for row in zip(targets, own.squeeze(1).tolist(), ranks, tops, strict=True)]


def _draw_by_weight(weights_RV: Tensor, uniforms_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Draw an index with probability proportional to its weight, by the inverse of the cumulative weights.

    `torch.multinomial` is 40 times slower on a CPU. Sums over a large vocabulary are cumulated in two levels, first
    over blocks and then within the chosen block, which is faster than one level and rounds less.

    Returns:
        The indices [R, 1], and the sums of the weights [R, 1].
    """
    vocab_size = weights_RV.shape[1]
    if vocab_size <= _ONE_LEVEL:
        cdf = weights_RV.cumsum(-1)
        total = cdf[:, -1:].contiguous()
        return _first_above(cdf, uniforms_R1 * total), total
    whole = vocab_size // _BLOCK * _BLOCK
    sums = [weights_RV[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)]
    if whole < vocab_size:
        sums.append(weights_RV[:, whole:].sum(-1, keepdim=True))
    cdf = torch.cat(sums, 1).cumsum(-1)
    total = cdf[:, -1:].contiguous()
    target = uniforms_R1 * total
    block = _first_above(cdf, target)
    before = cdf.gather(1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0)
    columns = block * _BLOCK + torch.arange(_BLOCK, device=block.device)
    inside = weights_RV.gather(1, columns.clamp(max=vocab_size - 1)).masked_fill_(columns >= vocab_size, 0)
    return block * _BLOCK + _first_above(inside.cumsum(-1), target - before), total


def _first_above(cdf: Tensor, targets: Tensor) -> Tensor:
    """Return the index of the first cumulative weight above the target, [R, 1].

    Rounding can make the target equal to the total; clamping to the last index with positive weight ensures that
    indices of weight 0 are never chosen.
    """
    chosen = torch.searchsorted(cdf, targets, right=True)
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous())
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
        seen = on_device(sorted(set(sequence.tokens)), logits_V.device)
        values = logits_V[seen]
        logits_V[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    generated = Counter(sequence.tokens[len(sequence.request.prompt) :])
    if generated and (params.presence_penalty or params.frequency_penalty):
        tokens = on_device(list(generated), logits_V.device)
        counts = on_device(list(generated.values()), logits_V.device)
        logits_V[tokens] -= params.presence_penalty + params.frequency_penalty * counts
