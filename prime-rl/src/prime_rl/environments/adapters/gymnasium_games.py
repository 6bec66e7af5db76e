"""Plays environments of Gymnasium as text, in the processes of `game_host.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import gymnasium
from gymnasium import spaces

from prime_rl.environments.adapters.turns import GameFault, Turn, finite
from prime_rl.environments.rewards.text import without_thinking
from prime_rl.utils.errors import one_line

_HIGHLIGHTED = re.compile(r"\x1b\[(?:\d+;)*(?:7|4[0-7]|10[0-7])m(.*?)\x1b\[0?m", re.DOTALL)
"""Text on a coloured background, which marks the position of the player. Shown to the model in brackets."""
_MAX_ERROR_CHARS = 300
_WHAT_IS_TEXT = "wrap the environment so that it uses text, and register the wrapped one"


def warm(settings: Mapping[str, Any]) -> None:
    """Import the environment's module. Raises GameFault: there is no such environment."""
    _spec(settings["game"])


def _spec(game: str) -> Any:
    module, _, name = game.rpartition(":")
    try:
        if module:
            __import__(module)
        return gymnasium.spec(name)
    except ImportError as error:
        raise GameFault(f"game = {game!r}: the module {module!r} does not import: {error}") from error
    except gymnasium.error.Error as error:
        near = get_close_matches(name, list(gymnasium.registry), 1)
        advice = f"; did you mean {near[0]!r}?" if near else ""
        raise GameFault(f"game = {game!r}: Gymnasium has no environment with this id{advice}") from error


class GymnasiumGame:
    """One environment: one episode per process, or many resets while rows are made."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises GameFault: the environment cannot be made, or its spaces are not text."""
        self._title = settings["game"]
        shown = {"render_mode": "ansi"} if settings["show_render"] else {}
        spec = _spec(self._title)
        try:
            self._env = gymnasium.make(spec, **settings["config"], **shown)
        except (gymnasium.error.Error, ImportError, TypeError, ValueError, AssertionError, KeyError) as error:
            raise GameFault(f"{self._title} cannot be made: {one_line(error, _MAX_ERROR_CHARS)}") from error
        self._actions = _action_names(self._env.action_space, settings["actions"], self._title)
        self._observations: Sequence[str] = settings["observations"]
        self._renders = settings["show_render"]
        if not self._renders:
            _check_observations(self._env.observation_space, self._observations, self._title)

    def about(self) -> dict[str, Any]:
        """Facts for the instruction to the model."""
        return {"actions": self._actions or [], "players": 1}

    def reset(self, seed: int, seat: int) -> Turn:
        observation, _ = self._env.reset(seed=seed)
        return Turn(self._shown(observation))

    def act(self, text: str) -> Turn:
        answer = _answer(text)
        action: Any = answer
        if self._actions is not None:
            name = _last_name(answer, self._actions)
            if name is None:
                return Turn(f"No action found. Answer with one of: {', '.join(self._actions)}", is_invalid=True)
            action = int(self._env.action_space.start) + self._actions.index(name)
        elif not self._env.action_space.contains(answer):
            return Turn(f"This action is not allowed: {_limits(self._env.action_space)}", is_invalid=True)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return Turn(
            self._shown(observation), finite(reward, self._title), bool(terminated or truncated), bool(truncated)
        )

    def _shown(self, observation: Any) -> str:
        if self._renders:
            return _HIGHLIGHTED.sub(r"[\1]", str(self._env.render()))
        return _written(self._env.observation_space, observation, self._observations)


def _action_names(space: Any, names: Sequence[str], title: str) -> list[str] | None:
    """Names of the actions of a Discrete space; None for text. Raises GameFault."""
    if isinstance(space, spaces.Text):
        if names:
            raise GameFault(
                f"actions: {title} takes text as its action, so there is nothing to name: leave actions out"
            )
        return None
    if not isinstance(space, spaces.Discrete):
        raise GameFault(f"the actions of {title} are {_named(space)}, neither Text nor Discrete: {_WHAT_IS_TEXT}")
    count = int(space.n)
    if names and len(names) != count:
        raise GameFault(f"actions: {len(names)} names for the {count} actions of {title}: give one name for each")
    return list(names) or [str(int(space.start) + index) for index in range(count)]


def _check_observations(space: Any, names: Sequence[str], title: str) -> None:
    """Raises GameFault if an observation cannot be written."""
    if isinstance(space, spaces.Discrete) and names and len(names) != int(space.n):
        raise GameFault(
            f"observations: {len(names)} names for the {int(space.n)} observations of {title}: give one name for each"
        )
    if names and not isinstance(space, spaces.Discrete):
        raise GameFault(
            f"observations: those of {title} are {_named(space)} and cannot have names: leave observations out"
        )
    if not _is_writable(space):
        raise GameFault(
            f"the observations of {title} are {_named(space)}, not text: "
            f"set `show_render = true` if it renders text, or {_WHAT_IS_TEXT}"
        )


def _is_writable(space: Any) -> bool:
    if isinstance(space, spaces.Tuple):
        return all(_is_writable(each) for each in space.spaces)
    if isinstance(space, spaces.Dict):
        return all(_is_writable(each) for each in space.spaces.values())
    return isinstance(space, spaces.Text | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)


def _written(space: Any, value: Any, names: Sequence[str] = ()) -> str:
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{name}: {_written(each, value[name])}" for name, each in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return ", ".join(_written(each, part) for each, part in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        return " ".join(str(int(part)) for part in value.ravel())
    if isinstance(space, spaces.Discrete):
        return names[int(value) - int(space.start)] if names else str(int(value))
    return str(value)


def _answer(text: str) -> str:
    """The text after the thinking; of it, the last `<action>…</action>`, if there is one."""
    answer = without_thinking(text)
    tagged = re.findall(r"<action>(.*?)</action>", answer, flags=re.DOTALL)
    return str(tagged[-1]).strip() if tagged else answer


def _last_name(answer: str, names: Sequence[str]) -> str | None:
    """The last name that occurs in the answer as a whole word, ignoring case."""
    longest_first = sorted(names, key=len, reverse=True)
    pattern = "|".join(re.escape(name) for name in longest_first)
    found = re.findall(rf"(?<!\w)({pattern})(?!\w)", answer, flags=re.IGNORECASE)
    return next((name for name in names if name.casefold() == found[-1].casefold()), None) if found else None


def _limits(space: Any) -> str:
    characters = "".join(sorted(space.character_set)) if hasattr(space, "character_set") else ""
    shown = characters if len(characters) <= 100 else f"{characters[:100]}…"
    return f"{space.min_length} to {space.max_length} characters of {shown}"


def _named(space: Any) -> str:
    return type(space).__name__
