"""State of a generation request in the engine: sampling parameters, sequences being sampled, and the completions."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from prime_rl.inference.embedded.engine.common_start import Origin
    from prime_rl.inference.embedded.engine.lora import Adapter
    from prime_rl.inference.embedded.engine.vision import PromptImages

FinishReason = Literal["stop", "length"]
TopLogprobs = list[tuple[int, float]]
"""(token id, log-probability), most likely first."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingParams:
    """Sampling parameters of a request. Compared by identity, to check whether a batch still has the same requests."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy decoding, which reports log-probabilities at temperature 1 without truncation."""
    top_k: int = 0
    """0 disables the limit."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and value to add to its logit."""
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the completion, including the end-of-sequence tokens unless they are ignored."""
    top_logprobs: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class StopMatcher(Protocol):
    """Detects stop strings in a sample as it grows."""

    def push(self, token: int) -> str | None:
        """Add the next token. Returns the stop string that it completes, if any."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start` to `end` (exclusive) of a completion were generated with weights `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sampled tokens. `top_logprobs` is empty unless requested."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]


@dataclass(frozen=True, slots=True)
class Completion(Tokens):
    """One finished sample. `token_ids` includes the token that ended it."""

    finish_reason: FinishReason
    stop_reason: int | str | None
    """The requested stop token or stop string that ended the sample; None for end of sequence or length."""
    versions: list[VersionSpan]
    routed_experts: np.ndarray | None = None
    """Expert ids [tokens - 1, layers, k] of prompt and completion: the last token was never computed. None if the
    engine does not return them."""


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Log-probability of a prompt token given the tokens before it, at temperature 1. `rank` starts at 1."""

    token_id: int
    logprob: float
    rank: int
    top: TopLogprobs


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of a request: its samples in order, and the prompt's log-probabilities if requested."""

    completions: list[Completion]
    prompt_logprobs: list[PromptLogprob] | None


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample while it is being generated."""

    request: GenerationRequest
    params: SamplingParams
    rng: random.Random
    tokens: list[int]
    """Prompt and completion tokens."""
    stop_matcher: StopMatcher | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    version_starts: list[tuple[int, int]] = field(default_factory=list)
    completion: Completion | None = None
    epoch: int = -1
    """The prefix cache's epoch when the sequence was prefilled; identifies the weights. See `PrefixCache`."""
    origin: Origin | None = None
    """Identifies the prompt that it shares with others; set at prefill. See `CommonStart`."""
    num_readable: int = 0
    """Number of sampled tokens that other threads may read. Updated after `completion`, so that readers see both."""

    @property
    def identity(self) -> SequenceOf[int]:
        """Its tokens, with images in place of theirs."""
        if self.request.images is None:
            return self.tokens
        return [*self.request.identity, *self.tokens[len(self.request.prompt) :]]

    @property
    def num_generated(self) -> int:
        return len(self.logprobs)

    def append(self, token: int, logprob: float, top: TopLogprobs | None, version: int) -> None:
        """Add a token generated with weights `version`, and finish the sample if the token ends it."""
        params = self.params
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, len(self.logprobs)))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        num_generated = len(self.logprobs)
        if top is not None and params.top_logprobs:
            self.top_logprobs.append(top[: params.top_logprobs])
        stop_string = self.stop_matcher.push(token) if self.stop_matcher is not None else None
        if token in params.stop_token_ids:
            self._finish("stop", None if token in self.request.eos_token_ids else token)
        elif stop_string is not None and num_generated >= params.min_tokens:
            self._finish("stop", stop_string)
        elif num_generated >= params.max_tokens:
            self._finish("length", None)
        self.num_readable = num_generated

    def drawn(self, start: int) -> Tokens:
        """The sampled tokens from `start` to `num_readable`. May be called from any thread."""
        end = self.num_readable
        offset = len(self.request.prompt)
        return Tokens(
            self.tokens[offset + start : offset + end], self.logprobs[start:end], self.top_logprobs[start:end]
        )

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        ends = [start for _, start in self.version_starts[1:]] + [self.num_generated]
        self.completion = Completion(
            token_ids=self.tokens[len(self.request.prompt) :],
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            versions=[VersionSpan(v, start, end) for (v, start), end in zip(self.version_starts, ends, strict=True)],
        )


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """A prompt and the number of samples to generate from it.

    Cancel `result` to abort the request; the engine drops its samples at the next step.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    n: int = 1
    eos_token_ids: frozenset[int] = frozenset()
    num_prompt_logprobs: int | None = None
    """Number of alternatives to report per prompt token; None computes no prompt log-probabilities."""
    stop_matchers: SequenceOf[StopMatcher | None] = ()
    """One per sample; empty if there are no stop strings."""
    adapter: Adapter | None = None
    """None is the base model."""
    images: PromptImages | None = None
    """None if the prompt has none."""
    result: Future[Generation] = field(default_factory=Future)
    prompt_logprobs: list[PromptLogprob] | None = None
    on_progress: Callable[[], None] | None = None
    """Called on the engine's thread after every step that sampled a token for this request."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Names the request in the log and in its error message."""
    sequences: list[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        matchers = self.stop_matchers or [None] * self.n
        self.sequences = [
            # `Random` drops the sign of a seed: -1 and 1 would be the same.
            Sequence(self, self.params, random.Random((self.seed + index) % (1 << 64)), list(self.prompt), matcher)
            for index, matcher in enumerate(matchers)
        ]

    @property
    def identity(self) -> tuple[int, ...]:
        """The prompt, with images in place of their tokens. Equal for prompts with the same keys and values."""
        return self.prompt if self.images is None else self.images.identity

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.num_prompt_logprobs is not None and self.prompt_logprobs is None

    def notify(self) -> None:
        """Call `on_progress`, if it is set."""
        if self.on_progress is not None:
            self.on_progress()

    def resolve_if_complete(self) -> None:
        """Set the result once all samples have finished. May be called once per sample; later calls do nothing."""
        completions = [sequence.completion for sequence in self.sequences if sequence.completion is not None]
        if len(completions) == len(self.sequences) and self._try_claim():
            self.result.set_result(Generation(completions, self.prompt_logprobs))

    def fail(self, error: Exception) -> None:
        """Fail the result with `error`, unless it is set or cancelled already."""
        if self._try_claim():
            self.result.set_exception(error)

    def _try_claim(self) -> bool:
        """Return whether the result can still be set; if so, it can no longer be cancelled."""
        return not self.result.done() and self.result.set_running_or_notify_cancel()
