"""Records the tokens of model calls. Training samples are built from these records.

A trace does not depend on who makes the calls. The chat client of an environment fills in what verifiers drops, and
`rollout` reads the result; a proxy between an agent and the server passes each raw reply to `TokenTrace.record`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from prime_rl.orchestrator.errors import MalformedRollout
from prime_rl.orchestrator.rollouts.replies import ChatReply, VersionSpan


class CallDetails(msgspec.Struct, frozen=True):
    """A model call apart from its tokens. Servers other than ours may not report all of it."""

    version_spans: tuple[VersionSpan, ...] = ()
    """Policy versions that sampled the completion, in order of its tokens."""
    finish_reason: str | None = None
    started_s: float | None = None
    """Unix time."""
    ended_s: float | None = None
    """Unix time."""

    @classmethod
    def from_reply(cls, reply: ChatReply) -> Self:
        choice = reply.choices[0]
        return cls(tuple(choice.weight_versions or ()), choice.finish_reason, reply.started_s, reply.ended_s)

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
        return min((span.version for span in self.version_spans), default=None)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """The tokens of a prompt, and the M tokens sampled after it."""

    prompt_ids: list[int]
    completion_ids: list[int]
    completion_logprobs: list[float]
    completion_mask: list[bool]
    """Which completion tokens may be trained on."""
    prompt_mask: list[bool]
    """Which prompt tokens may be trained on: none, unless an environment says so."""
    details: CallDetails = field(default_factory=CallDetails)

    def __post_init__(self) -> None:
        """
        Raises:
            MalformedRollout: tokens, mask and log-probabilities differ in length.
        """
        ids, mask, logprobs = len(self.completion_ids), len(self.completion_mask), len(self.completion_logprobs)
        if not ids == mask == logprobs:
            raise MalformedRollout(
                f"a completion has {ids} tokens, {mask} mask entries and {logprobs} log-probabilities"
            )
        if len(self.prompt_ids) != len(self.prompt_mask):
            raise MalformedRollout(
                f"a prompt has {len(self.prompt_ids)} tokens and {len(self.prompt_mask)} mask entries"
            )

    @classmethod
    def from_reply(cls, reply: ChatReply) -> Self | None:
        """The call that `reply` answers, or None if the reply has no token ids or log-probabilities."""
        choice = reply.choices[0]
        logprobs = None if choice.logprobs is None else choice.logprobs.content
        if reply.prompt_token_ids is None or choice.token_ids is None or logprobs is None:
            return None
        return cls(
            prompt_ids=reply.prompt_token_ids,
            completion_ids=choice.token_ids,
            completion_logprobs=[token.logprob for token in logprobs],
            completion_mask=[True] * len(choice.token_ids),
            prompt_mask=[False] * len(reply.prompt_token_ids),
            details=CallDetails.from_reply(reply),
        )

    @property
    def total_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(slots=True)
class TokenTrace:
    """The model calls of one rollout whose tokens are known, in order."""

    calls: list[ModelCall] = field(default_factory=list)

    def record(self, reply: ChatReply) -> ModelCall | None:
        """Append the call that `reply` answers; None, and nothing recorded, if the reply has no tokens."""
        call = ModelCall.from_reply(reply)
        if call is not None:
            self.calls.append(call)
        return call

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
            for span in call.details.version_spans:
                counts[span.version] += sum(call.completion_mask[span.start : span.end])
            covered = max((span.end for span in call.details.version_spans), default=0)
            counts[unreported] += sum(call.completion_mask[covered:])
        return +counts

    @property
    def completion_tokens(self) -> int:
        """Tokens after the first prompt, including those that the environment wrote between calls."""
        return self.total_tokens - len(self.calls[0].prompt_ids) if self.calls else 0

    @property
    def total_tokens(self) -> int:
        """Tokens in the prompt and completion of the last call."""
        return self.calls[-1].total_tokens if self.calls else 0

    def __bool__(self) -> bool:
        return bool(self.calls)
