"""Sessions of the proxy: what one rollout asked a model, and the exact tokens of each answer."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from prime_rl.orchestrator.errors import MalformedRollout
from prime_rl.orchestrator.guests.inside.model_client import session_name
from prime_rl.orchestrator.proxy.continuation import Message, canonical
from prime_rl.orchestrator.rollouts.replies import ChatReply
from prime_rl.orchestrator.rollouts.trace import CallDetails, ModelCall, TokenTrace
from prime_rl.orchestrator.servers.server import InferenceServer

MAX_CALLS = 1000
"""Model calls of one session. An agent that needs more is in a loop."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One answer, and the conversation that it ends."""

    conversation: tuple[Message, ...]
    """The messages of the request, and the answer."""
    rendering: Mapping[str, Any]
    """Arguments of the request, apart from the messages, that the chat template writes into its prompt."""
    tokens: ModelCall


@dataclass(slots=True)
class Session:
    """One rollout. A request with its key may use the model in its name."""

    key: str = field(repr=False)
    server: InferenceServer
    """All calls go to this server, where the keys and values of earlier turns are cached."""
    model: str
    """The name that all calls ask for. A rollout that began with the base model goes on with it."""
    sampling: Mapping[str, Any]
    """Arguments of every request. They replace those of the agent: training must know how tokens were sampled."""
    calls: list[RecordedCall] = field(default_factory=list)
    num_asked: int = 0
    """Answers that it has asked for."""
    is_cut_off: bool = False
    """Whether an answer reached its limit of tokens."""

    @property
    def trace(self) -> TokenTrace:
        """The calls in the order of their answers."""
        return TokenTrace([call.tokens for call in self.calls])

    def record(self, messages: Sequence[Mapping[str, Any]], rendering: Mapping[str, Any], reply: ChatReply) -> None:
        """Keep each answer of a reply.

        Raises:
            MalformedRollout: an answer lacks token ids or log-probabilities, or does not have as many of both.
        """
        asked = tuple(map(canonical, messages))
        for choice in reply.choices:
            self.is_cut_off |= choice.finish_reason == "length"
            logprobs = None if choice.logprobs is None else choice.logprobs.content
            if reply.prompt_token_ids is None or choice.token_ids is None or logprobs is None:
                raise MalformedRollout("a server answered without token ids or log-probabilities")
            tokens = ModelCall(
                prompt_ids=reply.prompt_token_ids,
                completion_ids=choice.token_ids,
                completion_logprobs=[token.logprob for token in logprobs],
                completion_mask=[True] * len(choice.token_ids),
                prompt_mask=[False] * len(reply.prompt_token_ids),
                details=CallDetails(
                    tuple(choice.weight_versions or ()), choice.finish_reason, reply.started_s, reply.ended_s
                ),
            )
            answer = canonical({"role": "assistant", **_said(choice.message)})
            self.calls.append(RecordedCall((*asked, answer), rendering, tokens))


def _said(message: Any) -> dict[str, Any]:
    return {"content": message.content, "tool_calls": message.tool_calls}


class Sessions:
    """The open sessions, by their keys."""

    def __init__(self) -> None:
        self._by_key: dict[str, Session] = {}
        self._keys: dict[str, str] = {}
        """Keys by their names."""

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: str) -> Session | None:
        return self._by_key.get(key)

    def named(self, name: str) -> Session | None:
        """The session whose key has this name (`session_name`)."""
        return self._by_key.get(self._keys.get(name, ""))

    @contextmanager
    def opened(
        self, count: int, server: InferenceServer, sampling_args: Mapping[str, Any]
    ) -> Iterator[tuple[Session, ...]]:
        """`count` sessions with keys that nobody can guess. Their keys are worthless after the block."""
        sampling = flat(sampling_args)
        sessions = tuple(Session(secrets.token_hex(24), server, server.model, sampling) for _ in range(count))
        self._by_key |= {session.key: session for session in sessions}
        self._keys |= {session_name(session.key): session.key for session in sessions}
        try:
            yield sessions
        finally:
            for session in sessions:
                del self._by_key[session.key]
                del self._keys[session_name(session.key)]


def flat(sampling_args: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling arguments as verifiers nests them, as keys of a request's body."""
    args = {name: value for name, value in sampling_args.items() if name != "extra_body"}
    if "max_tokens" in args:
        args["max_completion_tokens"] = args.pop("max_tokens")
    return {**args, **sampling_args.get("extra_body", {})}
