"""Finds the tokens of a prompt that continues a conversation, so that sampled tokens are never tokenized again.

An agent sends text. The text of an answer may tokenize differently from the tokens that were sampled, and training on
other tokens than the sampled ones is wrong. If the messages of a request begin with a recorded conversation, its prompt
therefore begins with the recorded tokens, and only what the agent added is tokenized.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec

from prime_rl.orchestrator.rollouts.trace import ModelCall

Tokenize = Callable[..., Awaitable[list[int]]]
"""`tokenize(messages, add_generation_prompt)`: the token ids of a rendered conversation."""
SHORT_ANSWER = {"role": "assistant", "content": "x"}
"""Stands for an answer where only what surrounds it is tokenized."""
MAX_ENDS = 256
_NO_ANSWERS = frozenset({"tool", "user", "system", "developer"})


class Message(NamedTuple):
    """What must be equal for two messages to be the same. Reasoning is left out: agents do not send it back."""

    role: str
    text: str
    calls: tuple[tuple[str, str, str], ...]
    """Id, name and arguments of each tool call."""
    answers_call: str


def canonical(message: Mapping[str, Any]) -> Message:
    """The parts of an OpenAI message that identify it. No content, null and an empty text are the same."""
    return Message(
        str(message.get("role")),
        _text(message.get("content")),
        tuple(_call(call) for call in message.get("tool_calls") or ()),
        str(message.get("tool_call_id") or ""),
    )


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    # A part that is not text, such as an image, must not look like any text.
    return "".join(
        part["text"] if isinstance(part, Mapping) and isinstance(part.get("text"), str) else f"\0{part!r}"
        for part in parts
    )


def _call(call: Mapping[str, Any]) -> tuple[str, str, str]:
    function = call.get("function") or {}
    return str(call.get("id")), str(function.get("name")), str(function.get("arguments"))


@dataclass(slots=True)
class RecordedCall:
    """One answer, and the conversation that it ends."""

    conversation: tuple[Message, ...]
    """The messages of the request, and the answer."""
    rendering: Mapping[str, Any]
    """Arguments of the request, apart from the messages, that the chat template writes into its prompt."""
    tokens: ModelCall
    completion_id: str = ""
    """The id of the completion, as the agent knows it. The choices of one completion share it."""
    reward: float | None = None


def longest_prefix(
    calls: Iterable[RecordedCall], messages: Sequence[Mapping[str, Any]], rendering: Mapping[str, Any]
) -> RecordedCall | None:
    """The call with the longest conversation that `messages` begins with and continues.

    A call with other tools or template arguments fits none: its prompt tells the model of the old ones.
    """
    asked = tuple(map(canonical, messages))
    fitting = (
        call
        for call in calls
        if call.rendering == rendering
        and len(call.conversation) < len(asked)
        and asked[: len(call.conversation)] == call.conversation
    )
    return max(fitting, key=lambda call: len(call.conversation), default=None)


async def continued_prompt(
    calls: Iterable[RecordedCall],
    messages: Sequence[Mapping[str, Any]],
    rendering: Mapping[str, Any],
    tokenize: Tokenize,
    ends: EndsOfTurns,
) -> list[int] | None:
    """Token ids of the prompt, which begin with all tokens of an earlier call. `rendering`: see `RecordedCall`.

    None if `messages` continues no call, for example because the agent rewrote its history, or if the chat template
    renders what the agent added differently after another answer. Then the server renders the messages, and the
    request begins a new sample.
    """
    earlier = longest_prefix(calls, messages, rendering)
    if earlier is None:
        return None
    added = messages[len(earlier.conversation) :]
    if any(message.get("role") not in _NO_ANSWERS for message in added):
        return None
    answered = _answered_calls(added)
    before = {"role": "assistant", "content": "", "tool_calls": answered} if answered else SHORT_ANSWER
    rendered = [tokenize([before, *added], add_generation_prompt=True)]
    if answered:
        rendered.append(tokenize([before], add_generation_prompt=False))
    turn, (whole, *own) = await asyncio.gather(ends.after(rendering, tokenize), asyncio.gather(*rendered))
    base = own[0] if own else turn.whole
    if whole[: len(base)] != base:
        ends.forget(rendering)  # a template may write the date
        return None
    said = earlier.tokens.prompt_ids + earlier.tokens.completion_ids
    return said + bridge(said, turn.end, whole[len(base) :])


def _answered_calls(added: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls for the stand-in of the recorded answer: those that the added messages answer."""
    answered = takewhile(lambda message: message.get("role") == "tool", added)
    return [
        {"id": message.get("tool_call_id"), "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for message in answered
    ]


class Turn(NamedTuple):
    """How a chat template writes `SHORT_ANSWER`."""

    whole: list[int]
    end: list[int]
    """What follows the answer's text."""


class EndsOfTurns:
    """What a chat template writes after an answer. It is the same for all sessions with the same template arguments."""

    def __init__(self) -> None:
        self._known: dict[bytes, Turn] = {}

    async def after(self, rendering: Mapping[str, Any], tokenize: Tokenize) -> Turn:
        key = msgspec.json.encode(rendering)
        if key not in self._known:
            turn = await _short_turn(tokenize)
            if len(self._known) >= MAX_ENDS:  # tasks with tools of their own
                self._known.clear()
            self._known[key] = turn
            return turn
        return self._known[key]

    def forget(self, rendering: Mapping[str, Any]) -> None:
        self._known.pop(msgspec.json.encode(rendering), None)


async def _short_turn(tokenize: Tokenize) -> Turn:
    """The end of a turn is the common end of two short ones."""
    turns = [[SHORT_ANSWER], [{**SHORT_ANSWER, "content": "y"}]]
    first, second = await asyncio.gather(*(tokenize(turn, add_generation_prompt=False) for turn in turns))
    pairs = zip(reversed(first), reversed(second), strict=False)
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return Turn(first, first[len(first) - length :])


def bridge(said: list[int], end: list[int], added: list[int]) -> list[int]:
    """The tokens between a sampled answer and the next: what is missing of its end, and what was added.

    An answer that was cut off, or that ended at a stop string or another token, lacks the whole end of its turn; others
    stop with its first token.
    """
    present = max(count for count in range(len(end) + 1) if said[len(said) - count :] == end[:count])
    tokens = end[present:] + added
    # Some templates end a turn with the token that begins the next message.
    return tokens[1:] if not end and tokens[:1] == said[-1:] else tokens
