"""What a game says after each action, cleaned for a model and a terminal."""

from __future__ import annotations

import math
import re
from typing import Any, Protocol

import msgspec

START_COLUMN = "start"
"""Column of a row that names what it starts, in words. Its prompt alone does not decide how the game goes on."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""Terminal sequences: colours, cursor movements, titles."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CUT = "\n[The rest is left out: {count:,} characters]"
_MAX_READ_FACTOR = 4
"""A text is cut to so many times its limit before it is searched for sequences, which are left out."""


class GameFault(Exception):
    """A game cannot be used as it is configured. The text is one line for users."""


class GameError(Exception):
    """A game failed, took too long, or its process or server is gone. The text is one line."""


class Turn(msgspec.Struct, frozen=True):
    """What follows an action, or the start of a game."""

    text: str
    """What the next player sees; at the end, what the trained player sees."""
    reward: float = 0.0
    """That of the trained player for this action."""
    is_over: bool = False
    is_truncated: bool = False
    """Whether the game was cut off by its own limit."""
    is_invalid: bool = False
    """Whether the answer held no action that the game allows."""
    invalid_by_others: int = 0
    """Answers of other seats without such an action, since the last turn."""
    player: int = 0
    """Who acts next."""


class Game(Protocol):
    """One game that is being played."""

    async def reset(self, seed: int, seat: int) -> Turn:
        """Start. The trained player has the seat. Raises GameError."""
        ...

    async def act(self, text: str) -> Turn:
        """Give an answer of the player whose turn it is. Raises GameError."""
        ...

    async def close(self) -> None: ...


def clean(text: str, limit: int) -> str:
    """The text without terminal sequences and control characters, and with at most `limit` characters and a note."""
    total = len(text)
    text = text[: limit * _MAX_READ_FACTOR].replace("\r\n", "\n")
    text = _CONTROL.sub("", _ESCAPES.sub("", text)).encode("utf-8", "replace").decode()
    if len(text) > limit or total > limit * _MAX_READ_FACTOR:
        return text[:limit] + _CUT.format(count=total - limit)
    return text


def finite(reward: Any, game: str) -> float:
    """The reward as a number. Raises GameError if it is none."""
    try:
        number = float(reward)
    except (TypeError, ValueError) as error:
        raise GameError(f"{game} gave the reward {str(reward)[:50]!r}, which is no number") from error
    if not math.isfinite(number):
        raise GameError(f"{game} gave the reward {number}")
    return number
