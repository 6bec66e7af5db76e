"""Plays games of TextArena, in the processes of `game_host.py`."""

from __future__ import annotations

import functools
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec
import nltk
import textarena
from textarena.envs.registration import ENV_REGISTRY

from prime_rl.environments.adapters.turns import GameError, GameFault, Turn, finite
from prime_rl.environments.agents.targets import BadTarget, resolve
from prime_rl.environments.rewards.text import without_thinking
from prime_rl.utils.errors import one_line

_LIST = re.compile(
    r"(?:available|valid|legal|possible|allowed|remaining)\s+(?:\w+\s+)?(?:moves?|actions?|cells?|squares?)[^\[\n]*"
    r"((?:\n?[^\[\n]*\[[^\]\n]+\])+)",
    re.IGNORECASE,
)
_MOVE = re.compile(r"\[[^\]\n]+\]")
nltk.download = lambda *args, **kwargs: False  # games load word lists from the network when they are made
SELF = "self"
_MAX_ERROR_CHARS = 300
_MOST_PLAYERS = 15
_RAISED = (
    ImportError,
    SyntaxError,
    TypeError,
    ValueError,
    AssertionError,
    KeyError,
    AttributeError,
    IndexError,
    OSError,
)
Policy = Callable[[str, random.Random], str]


def warm(settings: Mapping[str, Any]) -> None:
    """Make the game once, because some load dictionaries. Raises GameFault: it does not exist or cannot be made."""
    _made(settings["game"], json.dumps(settings["config"], sort_keys=True))


@functools.lru_cache(maxsize=1)
def _made(game: str, config: str) -> Any:
    if game not in ENV_REGISTRY:
        near = get_close_matches(game, list(ENV_REGISTRY), 1)
        advice = f"; did you mean {near[0]!r}?" if near else ""
        raise GameFault(f"game = {game!r}: TextArena has no game with this id{advice}")
    try:
        return textarena.make(game, **json.loads(config))
    except LookupError as error:
        raise GameFault(f"{game} cannot be made: {_lookup(error)}") from error
    except _RAISED as error:
        raise GameFault(f"{game} cannot be made: {one_line(error, _MAX_ERROR_CHARS)}") from error


class TextArenaGame:
    """One game. `act` plays for `Turn.player`. A policy plays the other seats, unless the model does."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises GameFault: the game or the opponent cannot be used."""
        self._title = settings["game"]
        self._env = _made(self._title, json.dumps(settings["config"], sort_keys=True))
        self._inner = self._env
        while hasattr(self._inner, "env"):
            self._inner = self._inner.env
        self._policy = _policy(settings["opponent"])
        self._players = settings["players"] or self._smallest()
        if settings["seat"] is not None and settings["seat"] >= self._players:
            raise GameFault(f"seat = {settings['seat']}: {self._title} has {self._players} players, from 0 on")
        self._seat = 0
        self._random = random.Random(0)
        self._heard: dict[int, list[str]] = {}

    def about(self) -> dict[str, Any]:
        return {"actions": [], "players": self._players}

    def reset(self, seed: int, seat: int) -> Turn:
        """Raises GameFault: the game does not start, or lists no moves for a random opponent."""
        self._seat = seat
        self._random = random.Random(seed)
        self._heard = defaultdict(list)
        try:
            self._start(self._players, seed)
        except LookupError as error:
            raise GameFault(f"{self._title} does not start: {_lookup(error)}") from error
        except AssertionError as error:
            raise GameFault(f"{self._title} does not start with {self._players} players: {error}") from error
        return self._until_asked()

    def first_seen(self) -> str:
        """Text that the trained player has seen already, if another player begins."""
        state = self._inner.state
        return _text(state.observations.get(self._seat, ()), self._seat, state.role_mapping)

    def act(self, text: str) -> Turn:
        mover = self._inner.state.current_player_id
        is_invalid = self._step(without_thinking(text))
        turn = self._until_asked()
        if mover == self._seat:
            return msgspec.structs.replace(turn, is_invalid=is_invalid)
        return msgspec.structs.replace(turn, invalid_by_others=turn.invalid_by_others + is_invalid)

    def _step(self, answer: str) -> bool:
        """Give the game the answer of the player whose turn it is. Returns whether the answer was invalid."""
        state = self._inner.state
        mover, errors = state.current_player_id, getattr(state, "error_count", 0)
        self._env.step(answer)
        # An invalid answer: the game counts an error and asks the same player again.
        again = state.current_player_id == mover and getattr(state, "error_count", 0) > errors
        return again or bool(state.done and state.game_info.get(mover, {}).get("invalid_move"))

    def _start(self, players: int, seed: int) -> None:
        random.seed(seed)
        self._env.reset(num_players=players, seed=seed)

    def _smallest(self) -> int:
        for players in range(1, _MOST_PLAYERS + 1):
            try:
                self._start(players, 0)
            except LookupError as error:
                if "nltk" in str(error):
                    raise GameFault(f"{self._title} does not start: {_lookup(error)}") from error
            except _RAISED:
                continue
            else:
                return players
        raise GameFault(f"{self._title} starts with none of 1 to {_MOST_PLAYERS} players: set `players` and `config`")

    def _until_asked(self) -> Turn:
        """Let the policy play until it is the model's turn, or the game is over."""
        state, invalid = self._inner.state, 0
        while not state.done:
            player, messages = self._inner.get_observation()
            news = _text(messages, player, state.role_mapping)
            self._heard[player].append(news)
            if player == self._seat or self._policy is None:
                return Turn(news, invalid_by_others=invalid, player=player)
            try:
                answer = self._policy("\n".join(self._heard[player]), self._random)
            except NoMove as error:
                raise GameFault(
                    f"{self._title} lists no moves, so opponent = 'random' cannot play it: "
                    "name a function as in `module:function`, or `self`"
                ) from error
            if not isinstance(answer, str):
                raise GameError(f"the opponent of {self._title} returned no text, but {type(answer).__name__}")
            invalid += self._step(answer)
        reward = finite((state.rewards or {}).get(self._seat, 0.0), self._title)
        left = _text(state.observations.get(self._seat, ()), self._seat, state.role_mapping)
        reason = str(state.game_info.get(self._seat, {}).get("reason") or "The game is over.")
        text = "\n".join(filter(None, (left, reason)))
        return Turn(text, reward, is_over=True, invalid_by_others=invalid, player=self._seat)


def _policy(opponent: str) -> Policy | None:
    """The policy of the other seats; None if the model plays them. Raises GameFault."""
    if opponent == SELF:
        return None
    if opponent == "random":
        return random_move
    try:
        found = resolve(opponent)
    except BadTarget as error:
        raise GameFault(f"opponent = {opponent!r}: {error}") from error
    if not callable(found):
        raise GameFault(f"opponent = {opponent!r} is not a function")
    policy: Policy = found
    return policy


class NoMove(Exception):
    """The text does not list moves."""


def random_move(seen: str, rng: random.Random) -> str:
    """Choose one of the moves that the game listed last, as in `Available Moves: '[0]', '[4]'`.

    Raises:
        NoMove: the game has listed no moves.
    """
    lists = _LIST.findall(seen)
    if not lists:
        raise NoMove
    moves: list[str] = _MOVE.findall(lists[-1])
    return rng.choice(moves)


def _text(messages: Iterable[Any], player: int, roles: Mapping[int, str]) -> str:
    """Messages that are new to a player. Its own answers are left out, because its conversation has them."""
    lines = []
    for sender, text, *kind in messages:
        if sender == player and kind and kind[0] is textarena.ObservationType.PLAYER_ACTION:
            continue
        lines.append(f"[{roles.get(sender, 'GAME')}] {text}")
    return "\n".join(lines)


def _lookup(error: LookupError) -> str:
    """Shorten NLTK's message of a dozen lines to the command that fetches the missing data."""
    words = str(error).split()
    if "nltk" in words:
        name = next((word.strip("'.") for word in words if word.startswith("'")), "popular")
        return f"it needs NLTK's data {name!r}: run `uv run python -m nltk.downloader {name}`"
    return one_line(error, _MAX_ERROR_CHARS)
