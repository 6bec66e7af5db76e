"""Records the tokens of model calls. Training samples are built from these records.

A trace does not depend on who makes the calls. The chat client of an environment fills in what verifiers drops, and
`rollout` reads the result; a proxy between an agent and the server passes each raw reply to `TokenTrace.record`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import msgspec

from prime_rl.orchestrator.errors import MalformedRollout
from prime_rl.orchestrator.rollouts.replies import ChatReply, Choice, Reported, VersionSpan, read_routed_experts
from prime_rl.transport.messages import ImageReference, LikeliestTokens, RoutedExperts


class CallDetails(msgspec.Struct, frozen=True):
    """A model call apart from its tokens. Servers other than ours may not report all of it."""

    weight_versions: tuple[VersionSpan, ...] = ()
    """Policy versions that sampled the completion, in order of its tokens."""
    finish_reason: str | None = None
    started_s: float | None = None
    """Unix time."""
    ended_s: float | None = None
    """Unix time."""
    rendering: dict[str, Any] = msgspec.field(default_factory=dict)
    """What the prompt was rendered with besides its messages: `tools`, `chat_template_kwargs`."""

    @classmethod
    def from_reply(cls, reply: ChatReply, choice: Choice) -> Self:
        versions = tuple(choice.weight_versions or ())
        return cls(versions, choice.finish_reason, reply.started_s, reply.ended_s, reply.rendering or {})

    @classmethod
    def from_builtins(cls, values: dict[str, Any] | None) -> Self:
        """What `to_builtins` returned; None gives no details."""
        return cls() if values is None else msgspec.convert(values, cls)

    def to_builtins(self) -> dict[str, Any]:
        """Plain values, which pass through verifiers and between processes."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values

    @property
    def oldest_version(self) -> int | None:
        return min((span.version for span in self.weight_versions), default=None)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a prompt.

    One that begins with all tokens of an earlier call keeps only what it adds. With all of them, a conversation's
    memory would grow with the square of its turns.
    """

    added: list[int]
    """Its tokens after those of `earlier`."""
    mask: list[bool] | None = None
    """Which of its tokens may be trained on; None if none may."""
    earlier: ModelCall | None = field(default=None, repr=False)
    shared: int = 0
    """Number of tokens of `earlier`."""

    @classmethod
    def of(cls, ids: list[int], mask: list[bool] | None = None) -> Self:
        """
        Raises:
            MalformedRollout: tokens and mask differ in length.
        """
        if mask is not None and len(mask) != len(ids):
            raise MalformedRollout(f"a prompt has {len(ids)} tokens and {len(mask)} mask entries")
        return cls(ids, mask if mask is not None and any(mask) else None)

    def __len__(self) -> int:
        return self.shared + len(self.added)

    @property
    def ids(self) -> list[int]:
        """All tokens, in a new list."""
        parts, call = [self.added], self.earlier
        while call is not None:
            parts += [call.completion_ids, call.prompt.added]
            call = call.prompt.earlier
        return [token for part in reversed(parts) for token in part]


_CERTAIN = -(2.0**-126)
"""The largest normal float32 below 0. To float32, its exponential is 1, and added to anything it changes nothing."""


def sampled_logprob(value: float) -> float:
    """The log-probability of a token that an engine sampled: not 0.0, also where it had no other choice, as with
    `top_p`. In samples, 0.0 marks what an environment wrote."""
    return value or _CERTAIN


@dataclass(frozen=True, slots=True)
class ModelCall:
    """The tokens of a prompt, and the M tokens sampled after it."""

    prompt: Prompt
    completion_ids: list[int]
    inference_logprobs: list[float]
    """0.0 for what an environment wrote between them, and for nothing else (`sampled_logprob`)."""
    completion_mask: list[bool]
    """Which completion tokens may be trained on."""
    details: CallDetails = field(default_factory=CallDetails)
    routed_experts: RoutedExperts | None = field(default=None, repr=False)
    """Of its tokens but the last, without those that the call before it has (`routes`). None if the server did not
    answer with them."""
    images: tuple[ImageReference, ...] = ()
    """The images of its prompt, in the order of their tokens. Those of equal size have equal tokens."""
    top: LikeliestTokens | None = field(default=None, repr=False)
    """The likeliest tokens at each of the M places. None if the request did not ask for them."""

    def __post_init__(self) -> None:
        """
        Raises:
            MalformedRollout: tokens, mask and log-probabilities differ in length.
        """
        ids, mask, logprobs = len(self.completion_ids), len(self.completion_mask), len(self.inference_logprobs)
        if not ids == mask == logprobs:
            raise MalformedRollout(
                f"a completion has {ids} tokens, {mask} mask entries and {logprobs} log-probabilities"
            )

    @classmethod
    def from_reply(cls, reply: ChatReply, choice: Choice) -> Self | None:
        """The call that one choice of `reply` answers; None if it has no token ids or log-probabilities.

        Raises:
            MalformedRollout: it does not have as many of both, or as many routed experts or likeliest tokens.
        """
        logprobs = None if choice.logprobs is None else choice.logprobs.content
        if reply.prompt_token_ids is None or choice.token_ids is None or logprobs is None:
            return None
        return cls(
            prompt=Prompt.of(reply.prompt_token_ids),
            completion_ids=choice.token_ids,
            inference_logprobs=[sampled_logprob(token.logprob) for token in logprobs],
            completion_mask=[True] * len(choice.token_ids),
            details=CallDetails.from_reply(reply, choice),
            routed_experts=routed_experts_of(
                choice.routed_experts, len(reply.prompt_token_ids) + len(choice.token_ids)
            ),
            images=reply.shown_images,
            top=likeliest_of(
                reply.reported,
                choice.token_ids,
                [token.logprob for token in logprobs],
                [{each.token: each.logprob for each in token.top_logprobs or ()} for token in logprobs],
            ),
        )

    @property
    def prompt_ids(self) -> list[int]:
        """All tokens of the prompt, in a new list."""
        return self.prompt.ids

    @property
    def prompt_mask(self) -> list[bool]:
        """Which prompt tokens may be trained on: none, unless an environment says so."""
        return [False] * len(self.prompt) if self.prompt.mask is None else list(self.prompt.mask)

    @property
    def routes(self) -> RoutedExperts | None:
        """The experts of all tokens but the last.

        A token of an earlier call has those of that call, which also gave its log-probability.
        """
        parts: list[RoutedExperts | None] = []
        call: ModelCall | None = self
        while call is not None:
            parts.append(call.routed_experts)
            call = call.prompt.earlier
        return RoutedExperts.joined(parts[::-1])

    @property
    def total_tokens(self) -> int:
        return len(self.prompt) + len(self.completion_ids)

    def shows_what(self, images: Sequence[ImageReference]) -> bool:
        """Whether its prompt begins with these images."""
        return self.images[: len(images)] == tuple(images)

    def sharing(self, earlier: Iterable[ModelCall]) -> ModelCall:
        """This call, without a copy of the tokens of the first of `earlier` that its prompt begins with."""
        ids = self.prompt_ids
        for call in earlier:
            count = call.total_tokens
            # The last token is compared first: calls of other conversations rarely have it there.
            if not call.completion_ids or count > len(ids) or ids[count - 1] != call.completion_ids[-1]:
                continue
            if ids[:count] == call.prompt_ids + call.completion_ids and self.shows_what(call.images):
                routes = None if self.routes is None else self.routes.tokens(count - 1)
                prompt = Prompt(ids[count:], self.prompt.mask, call, count)
                return replace(self, prompt=prompt, routed_experts=routes)
        return self


def routed_experts_of(answer: str | None, tokens: int) -> RoutedExperts | None:
    """The `routed_experts` of an answer, whose prompt and completion have `tokens` tokens.

    Raises:
        MalformedRollout: they are not those of all tokens but the last.
    """
    if answer is None:
        return None
    try:
        routes = read_routed_experts(answer)
    except ValueError as error:
        raise MalformedRollout(f"a server answered with malformed routed experts: {error}") from error
    if len(routes) != tokens - 1:
        raise MalformedRollout(f"a server answered with the routed experts of {len(routes)} tokens, not {tokens - 1}")
    return routes


def likeliest_of(
    reported: Reported | None, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Mapping[str, float]]
) -> LikeliestTokens | None:
    """The likeliest tokens of an answer, if its request asked for them.

    Raises:
        MalformedRollout: the answer does not have them.
    """
    if reported is None:
        return None
    try:
        return reported.read(ids, logprobs, tops)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:  # a server may answer with anything
        raise MalformedRollout(f"a server answered with malformed top_logprobs: {error}") from error


@dataclass(slots=True)
class TokenTrace:
    """The model calls of one rollout whose tokens are known, in order."""

    calls: list[ModelCall] = field(default_factory=list)

    def record(self, reply: ChatReply) -> ModelCall | None:
        """Append the call that `reply` answers; None, and nothing recorded, if the reply has no tokens."""
        call = ModelCall.from_reply(reply, reply.choices[0])
        return None if call is None else self.append(call)

    def append(self, call: ModelCall) -> ModelCall:
        """Append a call, which shares the tokens of an earlier one that it continues."""
        self.calls.append(call.sharing(reversed(self.calls)))
        return self.calls[-1]

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version that sampled any token; None if no reply said."""
        versions = (call.details.oldest_version for call in self.calls)
        return min((version for version in versions if version is not None), default=None)

    def trainable_by_version(self, unreported: int) -> Counter[int]:
        """Number of trainable completion tokens by the policy version that sampled them.

        Tokens whose version no reply said count for `unreported`.
        """
        counts: Counter[int] = Counter()
        for call in self.calls:
            for span in call.details.weight_versions:
                counts[span.version] += sum(call.completion_mask[span.start : span.end])
            covered = max((span.end for span in call.details.weight_versions), default=0)
            counts[unreported] += sum(call.completion_mask[covered:])
        return +counts

    @property
    def completion_tokens(self) -> int:
        """Tokens that were sampled, and those that the environment wrote between the calls of a conversation.

        The prompts that conversations begin with do not count: those of several agents, or of rewritten histories.
        """
        written = sum(len(call.prompt.added) for call in self.calls[1:] if call.prompt.earlier is not None)
        return written + sum(len(call.completion_ids) for call in self.calls)

    @property
    def total_tokens(self) -> int:
        """Tokens in the prompt and completion of the last call."""
        return self.calls[-1].total_tokens if self.calls else 0

    def __bool__(self) -> bool:
        return bool(self.calls)
