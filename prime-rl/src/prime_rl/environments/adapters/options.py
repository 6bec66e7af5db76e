"""Arguments of the environments in this room: `[orchestrator.env.args]`. Imports none of their packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from prime_rl.configs.ranges import Count, Seed, WholeNumber
from prime_rl.environments.adapters.games.game_options import GymnasiumConfig, OpenEnvConfig, TextArenaConfig
from prime_rl.utils.pydantic_config import BaseConfig, ConfigError, raise_faults
from prime_rl.utils.pydantic_config.faults import faults_of
from prime_rl.utils.pydantic_config.layers import Layer

Config = TypeVar("Config", bound=BaseConfig)
PACKAGES = {
    "prime_rl.environments.adapters.gymnasium": "gymnasium",
    "prime_rl.environments.adapters.reasoning_gym": "reasoning_gym",
    "prime_rl.environments.adapters.textarena": "textarena",
}
"""The package that each module of this room needs."""


class TaskConfig(BaseConfig):
    """One task of a mixture."""

    name: str = Field(min_length=1)
    """Name of the task in reasoning-gym, such as `chain_sum`."""

    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """How often a row is of this task, relative to the others."""

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


def read_reasoning_gym_config(args: Mapping[str, Any]) -> ReasoningGymConfig:
    """Check the arguments. Raises ConfigError with one line for each fault."""
    return _read(ReasoningGymConfig, args)


def read_gymnasium_config(args: Mapping[str, Any]) -> GymnasiumConfig:
    """Check the arguments. Raises ConfigError with one line for each fault."""
    return _read(GymnasiumConfig, args)


def read_textarena_config(args: Mapping[str, Any]) -> TextArenaConfig:
    """Check the arguments. Raises ConfigError with one line for each fault."""
    return _read(TextArenaConfig, args)


def read_openenv_config(args: Mapping[str, Any]) -> OpenEnvConfig:
    """Check the arguments. Raises ConfigError with one line for each fault."""
    return _read(OpenEnvConfig, args)


def _read(kind: type[Config], args: Mapping[str, Any]) -> Config:
    try:
        return kind.model_validate(dict(args))
    except ValidationError as error:
        raise ConfigError(faults_of(kind, error, [Layer("args", dict(args))])) from error


READERS: Mapping[str, Callable[[Mapping[str, Any]], BaseConfig]] = {
    "prime_rl.environments.adapters.gymnasium": read_gymnasium_config,
    "prime_rl.environments.adapters.openenv": read_openenv_config,
    "prime_rl.environments.adapters.reasoning_gym": read_reasoning_gym_config,
    "prime_rl.environments.adapters.textarena": read_textarena_config,
}
"""What checks the arguments, by module."""


def missing_package(module: str) -> str | None:
    """What to install for a module of this room, in one line; None if nothing is missing."""
    package = PACKAGES.get(module)
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return f"no package {package.replace('_', '-')!r}: install it with `uv sync --extra environments`"
