"""Finds the tokens of a prompt that continues a conversation, so that sampled tokens are never tokenized again.

An agent sends text. The text of an answer may tokenize differently from the tokens that were sampled, and training on
other tokens than the sampled ones is wrong. If the messages of a request begin with a recorded conversation, its prompt
therefore begins with the recorded tokens, and only what the agent added is tokenized.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from prime_rl.orchestrator.rollouts.turns import SHORT_ANSWER, EndsOfTurns, Tokenize, bridge

if TYPE_CHECKING:
    from prime_rl.orchestrator.proxy.recording import RecordedCall

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
