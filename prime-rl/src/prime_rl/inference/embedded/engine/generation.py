"""One generation request on its way through the engine: what was asked, what has been sampled, what is answered."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from prime_rl.inference.embedded.engine.common_start import Origin
    from prime_rl.inference.embedded.engine.lora import Adapter

FinishReason = Literal["stop", "length"]
TopLogprobs = list[tuple[int, float]]
"""(token id, log-probability), most likely first."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingParams:
    """How tokens are drawn. Compared by identity: a batch asks only whether it still holds the same requests."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy; its log-probabilities are those of temperature 1 without truncation."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer, the end-of-sequence tokens among them unless those are ignored."""
    top_logprobs: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class StopWatch(Protocol):
    """Looks for stop strings in a growing answer."""

    def push(self, token: int) -> str | None:
        """Take the next token. Returns the stop string that is now complete, if one is."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start` to `end` (exclusive) of a completion were drawn from the weights of `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sampled tokens. `top_logprobs` is empty unless they were asked for."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]


@dataclass(frozen=True, slots=True)
class Completion(Tokens):
    """One finished sample. `token_ids` include the token that ended it."""

    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop token or string that was asked for and met; None for the end of sequence and for the length."""
    versions: list[VersionSpan]


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """A prompt token under the raw distribution of the tokens before it. `rank` counts from 1."""

    token_id: int
    logprob: float
    rank: int
    top: TopLogprobs


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to a request: its samples in order, and the prompt's log-probabilities when they were asked for."""

    completions: list[Completion]
    prompt_logprobs: list[PromptLogprob] | None


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample that is being drawn."""

    request: GenerationRequest
    params: SamplingParams
    rng: random.Random
    tokens: list[int]
    """Prompt and completion."""
    stop_watch: StopWatch | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    version_starts: list[tuple[int, int]] = field(default_factory=list)
    completion: Completion | None = None
    epoch: int = -1
    """Of the weights that were live when the sequence was read; see `PrefixStore`."""
    origin: Origin | None = None
    """Set when the sequence is read: whose prompt it shares, see `CommonStart`."""
    num_readable: int = 0
    """Tokens that another thread may read: by then `completion` is set if the last of them ended the sample."""

    @property
    def num_generated(self) -> int:
        return len(self.logprobs)

    def append(self, token: int, logprob: float, top: TopLogprobs | None, version: int) -> None:
        """Take a token drawn from the weights of `version`, and finish the sample if the token ends it."""
        params = self.params
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, len(self.logprobs)))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        num_generated = len(self.logprobs)
        if top is not None and params.top_logprobs:
            self.top_logprobs.append(top[: params.top_logprobs])
        stop_string = self.stop_watch.push(token) if self.stop_watch is not None else None
        if token in params.stop_token_ids:
            self._finish("stop", None if token in self.request.eos_token_ids else token)
        elif stop_string is not None and num_generated >= params.min_tokens:
            self._finish("stop", stop_string)
        elif num_generated >= params.max_tokens:
            self._finish("length", None)
        self.num_readable = num_generated

    def drawn(self, start: int) -> Tokens:
        """The sampled tokens from `start` on, as far as another thread may read them."""
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
    """A prompt and the `n` samples wanted of it.

    `result` is cancelled by whoever no longer wants the answer; the engine then drops the samples at its next step.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    n: int = 1
    eos_token_ids: frozenset[int] = frozenset()
    num_prompt_logprobs: int | None = None
    """Alternatives to report for every prompt token; None asks for no log-probabilities of the prompt."""
    stop_watches: SequenceOf[StopWatch | None] = ()
    """One for each sample; empty when there are no stop strings."""
    adapter: Adapter | None = None
    """None is the base model."""
    result: Future[Generation] = field(default_factory=Future)
    prompt_logprobs: list[PromptLogprob] | None = None
    on_progress: Callable[[], None] | None = None
    """Called by the engine's thread after every step that drew a token of this request."""
    sequences: list[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        watches = self.stop_watches or [None] * self.n
        self.sequences = [
            Sequence(self, self.params, random.Random(self.seed + index), list(self.prompt), watch)
            for index, watch in enumerate(watches)
        ]

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.num_prompt_logprobs is not None and self.prompt_logprobs is None

    def answer_if_complete(self) -> None:
        """Set the result once every sample has ended. Samples that end together ask together; the first one sets it."""
        completions = [sequence.completion for sequence in self.sequences if sequence.completion is not None]
        if len(completions) == len(self.sequences) and self._claim():
            self.result.set_result(Generation(completions, self.prompt_logprobs))

    def fail(self, error: Exception) -> None:
        """Set the result to an error, unless it is set or cancelled already."""
        if self._claim():
            self.result.set_exception(error)

    def _claim(self) -> bool:
        """Whether the result is still to be set; from then on it cannot be cancelled."""
        return not self.result.done() and self.result.set_running_or_notify_cancel()
