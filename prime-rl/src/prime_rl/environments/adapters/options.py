"""Arguments of the adapters: `[orchestrator.env.args]`. Imports none of the adapted packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, model_validator

from prime_rl.configs.ranges import Count, NaturalSeed, Seed, SessionSeconds, WholeNumber
from prime_rl.utils.pydantic_config import BaseConfig, ConfigError, raise_faults
from prime_rl.utils.pydantic_config.faults import faults_of
from prime_rl.utils.pydantic_config.layers import Layer

EVAL_SEED = 1_000_000_000
Config = TypeVar("Config", bound=BaseConfig)


class GameConfig(BaseConfig):
    """Arguments of all games."""

    size: Count = 200
    """Number of rows for training. Row i starts a game with `seed` plus i."""

    seed: NaturalSeed = 0
    """Seed of the first row for training."""

    eval_size: WholeNumber = 50
    """Number of rows for evaluation. 0 evaluates on the training rows."""

    eval_seed: NaturalSeed = EVAL_SEED
    """Seed of the first row for evaluation."""

    system_prompt: str | None = None
    """System message. None describes how to answer, if that is known; an empty text omits the message."""

    max_turns: Count = 30
    """Most answers of the model in a game."""

    max_chars: Annotated[int, Field(ge=100, le=10_000_000)] = 20_000
    """Most characters of one message of the game. The rest is replaced by a note."""

    step_timeout_s: SessionSeconds = 60.0
    """Time limit of one action and of the start of a game, in seconds. A game that exceeds it is ended."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_faults(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        apart = max(self.size, self.eval_size)
        if self.eval_size and abs(self.eval_seed - self.seed) < apart:
            yield (
                f"eval_seed = {self.eval_seed} and seed = {self.seed} start the same games: "
                f"choose seeds at least {apart} apart"
            )


class GymnasiumConfig(GameConfig):
    """An environment of Gymnasium whose observations and actions are text, or can be written as text."""

    game: str = Field(min_length=1)
    """Id in Gymnasium's registry, such as `FrozenLake-v1`; `module:Id` imports a module first."""

    config: dict[str, Any] = Field({})
    """Arguments of `gymnasium.make`, such as `{ is_slippery = false }`."""

    actions: list[Annotated[str, Field(min_length=1)]] = Field([])
    """Names of the actions of a Discrete space, in its order. Empty uses their numbers."""

    observations: list[str] = Field([])
    """Names of the observations of a Discrete space, in its order. Empty uses their numbers."""

    show_render: bool = False
    """Show what the environment renders with `render_mode = "ansi"`, instead of the observation."""

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        lowered = [name.casefold() for name in self.actions]
        if len(set(lowered)) < len(lowered):
            yield "actions: two have the same name"
        if "render_mode" in self.config:
            yield 'config: leave out render_mode; `show_render = true` sets it to "ansi"'


class TextArenaConfig(GameConfig):
    """A game of TextArena. The model has one seat."""

    game: str = Field(min_length=1)
    """Id in TextArena's registry, such as `TicTacToe-v0`."""

    config: dict[str, Any] = Field({})
    """Arguments of `textarena.make`."""

    players: Annotated[int, Field(ge=1, le=100)] | None = None
    """Number of players. None takes the smallest number that the game accepts."""

    seat: WholeNumber | None = None
    """The model's seat. None gives row i the seat i modulo the number of players."""

    opponent: str = "random"
    """Player of the other seats: `random` chooses from the moves that the game lists; `self` is the model, whose tokens
    there are not trained on; `module:function` is called with what the player has seen and a `random.Random`, and
    returns the answer."""

    unfinished_reward: Annotated[float, Field(ge=-1e6, le=1e6)] = 0.0
    """Reward of a game that `max_turns` ends."""

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if self.opponent not in ("random", "self") and not all(self.opponent.partition(":")):
            yield f"opponent = {self.opponent!r}: choose random, self, or a function as in `module:function`"
        if self.players is not None and self.seat is not None and self.seat >= self.players:
            yield f"seat = {self.seat}: with {self.players} players, seats are 0 to {self.players - 1}"


class OpenEnvConfig(GameConfig):
    """An environment on an OpenEnv server."""

    url: str = Field(min_length=1)
    """Base URL, such as `http://localhost:8000`."""

    size: Count = 64
    """Number of rows for training. Each is reset once when the environment is loaded."""

    eval_size: WholeNumber = 16
    """Number of rows for evaluation. 0 evaluates on the training rows."""

    reset: dict[str, Any] = Field({})
    """Further arguments of a reset. `seed` is the row's."""

    action: dict[str, Any] = Field({})
    """Fields that every action has."""

    action_field: str | None = None
    """Field of the action that holds the model's answer. None takes the only one that the server's schema leaves; if
    there are several, the model must answer with a JSON object."""

    observation_field: str | None = None
    """Field of the observation that the model sees. None shows the only one, or all as JSON."""

    max_sessions: Annotated[int, Field(ge=1, le=10_000)] = 32
    """Most sessions at a time. A server that takes fewer is asked for fewer."""

    token_var: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable with a token that is sent as `Authorization: Bearer`."""

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable, parts = False, urlsplit("")
        if not usable:
            yield f"url = {self.url!r}: give a base URL such as http://localhost:8000"
        if parts.username or parts.password or parts.query:
            yield "url: leave out user, password and query; `token_var` names an environment variable with a token"
        if "seed" in self.reset:
            yield "reset: leave out seed, which is the row's"
        if self.action_field is not None and self.action_field in self.action:
            yield f"action_field = {self.action_field!r} is also a field of `action`"


class TaskConfig(BaseConfig):
    """One task of a mixture."""

    name: str = Field(min_length=1)
    """Name of the task in reasoning-gym, such as `chain_sum`."""

    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Relative frequency of rows of this task."""

    config: dict[str, Any] = Field({})
    """The task's own settings, such as `{ min_terms = 2, max_terms = 3 }`."""


class ReasoningGymConfig(BaseConfig):
    """Tasks of reasoning-gym."""

    task: str | None = None
    """Name of the only task."""

    config: dict[str, Any] = Field({})
    """Settings of `task`."""

    datasets: list[TaskConfig] = Field([])
    """Several tasks: `[{ name = "chain_sum", weight = 2, config = {} }]`."""

    size: Count = 1000
    """Number of rows for training."""

    seed: Seed = 0
    """Seed of the rows for training."""

    eval_size: WholeNumber = 100
    """Number of rows for evaluation, at most. A question that is trained on is left out. 0 evaluates on the training
    rows."""

    eval_seed: Seed = 1_000_000_000
    """Seed of the rows for evaluation."""

    system_prompt: str | None = None
    """System message. None takes reasoning-gym's, which asks for `<answer>…</answer>`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_faults(self._faults())
        return self

    @property
    def tasks(self) -> list[TaskConfig]:
        """All tasks."""
        if self.task is None:
            return self.datasets
        return [TaskConfig(name=self.task, config=self.config)]

    def _faults(self) -> Iterator[str]:
        if (self.task is None) == (not self.datasets):
            yield 'name one task, as in `task = "chain_sum"`, or several in `datasets`, not both'
        if self.config and self.task is None:
            yield "config belongs to `task`: give each of `datasets` its own"
        for task in self.tasks:
            if unwanted := {"seed", "size"} & set(task.config):
                yield f"config of {task.name!r}: set {' and '.join(sorted(unwanted))} as arguments of the environment"
        # Row i of a task is made from the seed plus i.
        if self.eval_size and abs(self.eval_seed - self.seed) < max(self.size, self.eval_size):
            yield (
                f"eval_seed = {self.eval_seed} and seed = {self.seed} make the same rows: "
                f"choose seeds at least {max(self.size, self.eval_size)} apart"
            )


def _read(kind: type[Config], args: Mapping[str, Any]) -> Config:
    try:
        return kind.model_validate(dict(args))
    except ValidationError as error:
        raise ConfigError(faults_of(kind, error, [Layer("args", dict(args))])) from error


def read_gymnasium_config(args: Mapping[str, Any]) -> GymnasiumConfig:
    """Check the arguments. Raises ConfigError with one line for each fault."""
    return _read(GymnasiumConfig, args)


def read_textarena_config(args: Mapping[str, Any]) -> TextArenaConfig:
    """Check the arguments. Raises ConfigError with one line for each fault."""
    return _read(TextArenaConfig, args)


def read_openenv_config(args: Mapping[str, Any]) -> OpenEnvConfig:
    """Check the arguments. Raises ConfigError with one line for each fault."""
    return _read(OpenEnvConfig, args)


def read_reasoning_gym_config(args: Mapping[str, Any]) -> ReasoningGymConfig:
    """Check the arguments. Raises ConfigError with one line for each fault."""
    return _read(ReasoningGymConfig, args)


READERS: Mapping[str, Callable[[Mapping[str, Any]], BaseConfig]] = {
    "prime_rl.environments.adapters.gymnasium": read_gymnasium_config,
    "prime_rl.environments.adapters.openenv": read_openenv_config,
    "prime_rl.environments.adapters.reasoning_gym": read_reasoning_gym_config,
    "prime_rl.environments.adapters.textarena": read_textarena_config,
}
"""The function that checks the arguments, by module."""
