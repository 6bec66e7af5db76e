"""Sessions of the proxy: what one rollout asked a model, the exact tokens of each answer, and its rewards.

Agents in foreign processes start sessions themselves, one for each attempt that the run offers.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from prime_rl.environments.agents.returns import InvalidReward, checked_reward
from prime_rl.orchestrator.errors import MalformedRollout
from prime_rl.orchestrator.proxy.continuation import EndsOfTurns, Message, RecordedCall, canonical
from prime_rl.orchestrator.rollouts.replies import ChatReply
from prime_rl.orchestrator.rollouts.trace import ModelCall
from prime_rl.orchestrator.servers.channel import ChatChannel
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.orchestrator.workers.inside.model_client import session_name
from prime_rl.utils.images import ShownImages

MAX_CALLS = 1000
"""Model calls of one session. An agent that needs more is in a loop."""


class Upstream(Protocol):
    """The part of an inference server that sessions use."""

    @property
    def channel(self) -> ChatChannel: ...

    @property
    def base_model(self) -> str:
        """The model whose chat template renders conversations."""

    @property
    def images(self) -> ShownImages | None:
        """Shows it images. None: they reach it as they are, and no training."""


@dataclass(slots=True)
class Session:
    """One rollout. A request with its key may use the model in its name."""

    key: str = field(repr=False)
    server: Upstream
    """All calls go to this server, where the keys and values of earlier turns are cached."""
    model: str
    """The name that all calls ask for. A rollout that began with the base model goes on with it."""
    sampling: Mapping[str, Any]
    """Arguments of every request. They replace those of the agent: training must know how tokens were sampled."""
    ends: EndsOfTurns = field(default_factory=EndsOfTurns, repr=False)
    files: Sequence[Any] | None = None
    """Images that its requests may name, beside data URLs. None, for the user's own environments: all that this process
    may read. An agent may name those of its row."""
    calls: list[RecordedCall] = field(default_factory=list)
    num_asked: int = 0
    """Answers that it has asked for."""
    is_cut_off: bool = False
    """Whether an answer reached its limit of tokens."""
    reward: float | None = None
    """The reward of the whole session, which counts for its last call."""
    dialogues: dict[str, list[dict[str, Any]]] = field(default_factory=dict, repr=False)
    """The messages of each response of the responses API, with its answer."""

    @property
    def recorded(self) -> list[tuple[str, ModelCall]]:
        """The calls in the order of their answers, with the ids of their completions."""
        return [(call.completion_id, call.tokens) for call in self.calls]

    @property
    def rewards(self) -> list[float | None]:
        """The reward of each call. That of the whole session is added to the last call's."""
        rewards = [call.reward for call in self.calls]
        if self.reward is not None and rewards:
            rewards[-1] = math.fsum((rewards[-1] or 0.0, self.reward))
        return rewards

    def set_reward(self, reward: Any, completion_id: str | None = None, choice: int | None = None) -> None:
        """Set the reward of the whole session, of a completion, or of one of its choices. The last value counts.

        Raises:
            InvalidReward: it is not a finite number, or there is no such completion.
        """
        value = checked_reward(reward)
        if completion_id is None:
            self.reward = value
            return
        choices = [call for call in self.calls if call.completion_id == completion_id]
        if not choices:
            raise InvalidReward(f"this session has no completion {completion_id!r}")
        if choice is not None and not 0 <= choice < len(choices):
            raise InvalidReward(f"completion {completion_id!r} has the choices 0 to {len(choices) - 1}")
        for call in choices if choice is None else [choices[choice]]:
            call.reward = value

    def set_rewards(self, result: Any) -> None:
        """Set what an agent returned: a number for the session, or a number for each completion id. None sets nothing.

        Raises:
            InvalidReward: it is neither, or names completions that do not exist.
        """
        if isinstance(result, Mapping):
            for completion_id, reward in result.items():
                self.set_reward(reward, str(completion_id))
        elif result is not None:
            self.set_reward(result)

    @property
    def is_rewarded(self) -> bool:
        return self.reward is not None or any(call.reward is not None for call in self.calls)

    def record(
        self,
        messages: Sequence[Mapping[str, Any]],
        rendering: Mapping[str, Any],
        reply: ChatReply,
        completion_id: str = "",
    ) -> None:
        """Keep each answer of a reply.

        Raises:
            MalformedRollout: an answer lacks token ids or log-probabilities, or does not have as many of both.
        """
        asked = tuple(map(canonical, messages))
        for choice in reply.choices:
            self.is_cut_off |= choice.finish_reason == "length"
            tokens = ModelCall.from_reply(reply, choice)
            if tokens is None:
                raise MalformedRollout("a server answered without token ids or log-probabilities")
            said = {"content": choice.message.content, "tool_calls": choice.message.tool_calls}
            self.keep((*asked, canonical({"role": "assistant", **said})), rendering, tokens, completion_id)

    def keep(
        self, conversation: tuple[Message, ...], rendering: Mapping[str, Any], tokens: ModelCall, completion_id: str
    ) -> None:
        """Record a call. What it has in common with an earlier one is kept once."""
        tokens = tokens.sharing(call.tokens for call in reversed(self.calls))
        earlier = next((call for call in reversed(self.calls) if call.tokens is tokens.prompt.earlier), None)
        known = () if earlier is None else earlier.conversation
        if conversation[: len(known)] == known:
            conversation = known + conversation[len(known) :]
        self.calls.append(RecordedCall(conversation, rendering, tokens, completion_id))


class Sessions:
    """The open sessions, by their keys."""

    def __init__(self) -> None:
        self._by_key: dict[str, Session] = {}
        self._keys: dict[str, str] = {}
        """Keys by their names."""
        self._ends = EndsOfTurns()

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: str) -> Session | None:
        return self._by_key.get(key)

    def named(self, name: str) -> Session | None:
        """The session whose key has this name (`session_name`)."""
        return self._by_key.get(self._keys.get(name, ""))

    def end(self, session: Session) -> None:
        """Answer no more requests with its key. What it recorded stays."""
        self._by_key.pop(session.key, None)
        self._keys.pop(session_name(session.key), None)

    @contextmanager
    def opened(
        self, count: int, server: InferenceServer, sampling_args: Mapping[str, Any]
    ) -> Iterator[tuple[Session, ...]]:
        """`count` sessions with keys that nobody can guess. Their keys are worthless after the block."""
        sampling = flat(sampling_args)
        sessions = tuple(
            Session(secrets.token_hex(24), server, server.model, sampling, self._ends) for _ in range(count)
        )
        self._by_key |= {session.key: session for session in sessions}
        self._keys |= {session_name(session.key): session.key for session in sessions}
        try:
            yield sessions
        finally:
            for session in sessions:
                self.end(session)


def flat(sampling_args: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling arguments as verifiers nests them, as keys of a request's body."""
    args = {name: value for name, value in sampling_args.items() if name != "extra_body"}
    if "max_tokens" in args:
        args["max_completion_tokens"] = args.pop("max_tokens")
    return {**args, **sampling_args.get("extra_body", {})}


@dataclass(slots=True, eq=False)
class Offer:
    """An attempt that waits for an agent."""

    session: Session
    task: Mapping[str, Any]
    """The row of the dataset."""
    ended: asyncio.Future[None]
    is_taken: bool = field(default=False)


class Offers:
    """Attempts that wait for an agent, first come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[Offer] = deque()
        self._by_session: dict[str, Offer] = {}
        self._added = asyncio.Condition()
        self.num_started = 0
        """Attempts that an agent has taken, since the beginning."""

    def __len__(self) -> int:
        """Attempts that no agent has taken."""
        return len(self._waiting)

    async def run(self, session: Session, task: Mapping[str, Any]) -> None:
        """Offer an attempt until an agent ends it. Cancelling it withdraws the offer."""
        offer = Offer(session, task, asyncio.get_running_loop().create_future())
        self._by_session[session.key] = offer
        async with self._added:
            self._waiting.append(offer)
            self._added.notify()
        try:
            await offer.ended
        finally:
            del self._by_session[session.key]
            if not offer.is_taken:
                self._waiting.remove(offer)

    async def take(self, wait_s: float) -> Offer | None:
        """The attempt that has waited longest; None if there is none within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s), self._added:
                await self._added.wait_for(lambda: bool(self._waiting))
                offer = self._waiting.popleft()
                offer.is_taken = True
                self.num_started += 1
                return offer
        except TimeoutError:
            return None

    def end(self, session: Session) -> None:
        """The agent of a session is done. Does nothing for sessions that were not offered."""
        offer = self._by_session.get(session.key)
        if offer is not None and not offer.ended.done():
            offer.ended.set_result(None)
