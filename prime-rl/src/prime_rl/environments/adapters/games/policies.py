"""Opponents: functions of what a player has seen and a `random.Random`, which return the player's answer."""

from __future__ import annotations

import random
import re

_LIST = re.compile(
    r"(?:available|valid|legal|possible|allowed|remaining)\s+(?:\w+\s+)?(?:moves?|actions?|cells?|squares?)[^\[\n]*"
    r"((?:\n?[^\[\n]*\[[^\]\n]+\])+)",
    re.IGNORECASE,
)
_MOVE = re.compile(r"\[[^\]\n]+\]")


class NoMove(Exception):
    """The text lists no moves."""


def random_move(seen: str, rng: random.Random) -> str:
    """One of the moves in brackets that the game listed last, as in `Available Moves: '[0]', '[4]'`.

    Raises:
        NoMove: there is no such list.
    """
    lists = _LIST.findall(seen)
    if not lists:
        raise NoMove
    moves: list[str] = _MOVE.findall(lists[-1])
    return rng.choice(moves)
