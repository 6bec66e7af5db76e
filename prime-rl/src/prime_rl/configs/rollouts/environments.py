"""Environments, for training and for evaluation."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from prime_rl.configs.ranges import CountOrAll, Fraction, Seconds, WholeNumber
from prime_rl.utils.pydantic_config import BaseConfig


class EnvConfig(BaseConfig):
    """An environment of the verifiers library."""

    id: str = "reverse-text"
    """Id of the environment, with or without @version."""

    args: dict[str, Any] = Field({})
    """Arguments of its constructor."""

    name: str | None = None
    """Name in logs and metrics. None takes the id."""

    address: str | None = None
    """Address of a running environment server. None runs the environment in the orchestrator, or with `env_servers` in
    a server that the orchestrator starts."""

    python: Path | None = None
    """Python interpreter of the environment, such as `envs/medqa/.venv/bin/python`: it then runs in a process of its
    own, with the packages of that interpreter. verifiers 0.1.5 to 0.4 may be installed there. None takes the run's
    own."""

    project: Path | None = None
    """Directory of the environment's package, with its `pyproject.toml`. The environment runs as with `python`, in an
    interpreter that uv makes before the run starts and keeps in the user's cache. A new `pyproject.toml` or `uv.lock`
    makes a new one."""

    judge: str | None = None
    """Name of a `[judge.NAME]`. The constructor gets it in those of these arguments that it has: `judge_client`,
    `judge_model`, `judge_sampling_args`, `judge_base_url`, `judge_api_key_var`, `judge_api_key`."""

    taskset: dict[str, Any] = Field({})
    """Table of a taskset of verifiers v1, as verifiers reads it. Its `id` is that of the environment. Needs `python` or
    `project`."""

    agent: dict[str, Any] = Field({})
    """Table of the agent that plays a taskset of verifiers v1, as verifiers reads it: `harness`, `runtime`, `max_turns`
    and others. By default a chat with the task's tools, in processes on this machine."""

    extra_env_kwargs: dict[str, Any] = Field({})
    """Attributes to set on the environment. The orchestrator adds `seq_len` and `score_rollouts`."""

    max_reward_errors: Fraction = 0.5
    """End the run if reward functions fail in more than this fraction of the last 32 rollouts, in all of the first 8,
    or in all of a shorter run. 1 never does."""

    timeout_s: Seconds | None = None
    """Longest time of a group of rollouts with its scoring, in seconds. A group that takes longer fails and is repeated
    as after any error. A loop without `await` cannot be ended this way: it blocks its whole process. None sets
    no limit."""

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.project is not None and self.python is not None:
            raise ValueError("project and python exclude each other: uv makes the interpreter of a project")
        if (self.taskset or self.agent) and self.project is None and self.python is None:
            raise ValueError("taskset and agent are of verifiers v1, which the run itself lacks: set project or python")
        for name, value in (("python", self.python), ("project", self.project)):
            if value is not None and self.address is not None:
                raise ValueError(f"{name} and address exclude each other: at an address, a server runs already")
        if self.judge is not None and self.address is not None:
            raise ValueError("judge and address exclude each other: the server at an address asks its own judge")
        return self


class EvalEnvConfig(EnvConfig):
    """An environment to evaluate on."""

    num_examples: CountOrAll | None = None
    """Number of examples. None or 0 takes the value of `eval`."""

    rollouts_per_example: WholeNumber | None = None
    """Rollouts per example. None or 0 takes the value of `eval`."""

    skip_first: WholeNumber = 0
    """Number of examples to skip at the start."""

    max_retries: WholeNumber = 0
    """Number of retries after a failed rollout."""


def repeated_names(key: str, envs: Sequence[EnvConfig]) -> Iterator[str]:
    """One line for each name that several environments share, in logs and metrics."""
    names = [env.name or env.id for env in envs]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{key}: several environments are called {name!r}: set `name`"


def has_own_order(env: EnvConfig) -> bool:
    """Whether the order of an environment's rows means something: `rows` with several datasets or with a curriculum."""
    datasets = env.args.get("datasets")
    if env.id != "rows" or not isinstance(datasets, list):
        return False
    return len(datasets) > 1 or any(isinstance(each, dict) and each.get("order") is not None for each in datasets)
