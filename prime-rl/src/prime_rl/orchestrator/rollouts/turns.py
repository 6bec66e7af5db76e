"""What stands between two turns of a conversation whose tokens are known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec

Tokenize = Callable[..., Awaitable[list[int]]]
"""`tokenize(messages, add_generation_prompt)`: the token ids of a rendered conversation."""

SHORT_ANSWER = {"role": "assistant", "content": "x"}
"""Stands for an answer where only what surrounds it is tokenized."""
MAX_ENDS = 256


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
