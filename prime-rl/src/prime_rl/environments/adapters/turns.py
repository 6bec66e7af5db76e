"""The interface of games: `Game`, `Turn`, the two exceptions, and the cleaning of a game's text."""

from __future__ import annotations

import math
import re
from typing import Any, Protocol

import msgspec

from prime_rl.utils.errors import RunError, UserError

START_COLUMN = "start"
"""Column that names the start of a row's game (seed, seat). Two rows with equal prompts may start different games."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""Terminal sequences: colours, cursor movements, titles."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CUT = "\n[The rest is left out: {count:,} characters]"
_MAX_READ_FACTOR = 4
"""A text is cut to this multiple of its limit before terminal sequences are removed, to bound the work."""


class GameFault(UserError):
    """The user's mistake: a game cannot be used as configured. One line."""


class GameError(RunError):
    """A rollout's failure: a game failed, took too long, or its process or server is gone. One line."""


class Turn(msgspec.Struct, frozen=True):
    """The state of a game after its start or after an action."""

    text: str
    """Text for the next player; after the end, for the trained player."""
    reward: float = 0.0
    """Reward of the trained player for this action."""
    is_over: bool = False
    is_truncated: bool = False
    """Whether the game's own limit on its length ended it."""
    is_invalid: bool = False
    """Whether the answer had no action that the game allows."""
    invalid_by_others: int = 0
    """Invalid answers of other seats since the last turn."""
    player: int = 0
    """Seat of the player who acts next."""


class Game(Protocol):
    """One running game."""

    async def reset(self, seed: int, seat: int) -> Turn:
        """Start the game, with the trained player in this seat. Raises GameError."""
        ...

    async def act(self, text: str) -> Turn:
        """Give the game the answer of the player whose turn it is. Raises GameError."""
        ...

    async def close(self) -> None: ...


def clean(text: str, limit: int) -> str:
    """Remove terminal sequences and control characters. A text longer than `limit` is cut and gets a note."""
    total = len(text)
    text = text[: limit * _MAX_READ_FACTOR].replace("\r\n", "\n")
    text = _CONTROL.sub("", _ESCAPES.sub("", text)).encode("utf-8", "replace").decode()
    if len(text) > limit or total > limit * _MAX_READ_FACTOR:
        return text[:limit] + _CUT.format(count=total - limit)
    return text


def finite(reward: Any, game: str) -> float:
    """Return the reward as a number. Raises GameError if it is not a finite number."""
    try:
        number = float(reward)
    except (TypeError, ValueError) as error:
        raise GameError(f"{game} gave the reward {str(reward)[:50]!r}, which is not a number") from error
    if not math.isfinite(number):
        raise GameError(f"{game} gave the reward {number}")
    return number
