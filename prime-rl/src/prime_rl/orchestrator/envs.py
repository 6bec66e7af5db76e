"""The training environments: user code, loaded through verifiers and run in this process or in an `env-server`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import verifiers as vf
from datasets import Dataset, disable_progress_bars
from verifiers.serve import ZMQEnvClient

from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.configs.shared import LogConfig
from prime_rl.orchestrator.client import InferenceServer
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.rollout import ExampleRef, Rollout, check_trainable, read_rollout

SERVER_STARTUP_TIMEOUT_S = 600.0
STATE_COLUMNS = ["trajectory", "sampling_args"]


class TrainingEnvironment:
    """One environment and its training rows."""

    def __init__(self, name: str, env: vf.Environment, address: str | None) -> None:
        self.name = name
        self.address = address
        self._env = env
        self._rows: Dataset = env.get_dataset()

    def __len__(self) -> int:
        return len(self._rows)

    async def connect(self) -> None:
        """Wait for the environment's server, where the config names one.

        Raises:
            EnvironmentFault: it does not answer.
        """
        if self.address is None:
            return
        client = ZMQEnvClient(self.address, name=self.name, startup_timeout=SERVER_STARTUP_TIMEOUT_S)
        try:
            await client.wait_for_server_startup()
        except TimeoutError as error:
            raise EnvironmentFault(
                f"the server of environment {self.name!r} at {self.address} does not answer"
            ) from error
        self._env.env_client = client

    async def run_group(
        self, example: ExampleRef, size: int, server: InferenceServer, sampling_args: dict[str, Any], version: int
    ) -> list[Rollout]:
        """Attempt one example `size` times and score the attempts together.

        Whatever the environment's code raises passes through.

        Raises:
            MalformedRollout: nothing that came back can be trained on.
        """
        outputs = await self._env.run_group(
            [self._rows[example.row]] * size,
            server.client if self._env.env_client is None else server.client_config,
            server.model,
            sampling_args,
            state_columns=STATE_COLUMNS,
        )
        rollouts = [read_rollout(output, example, sampling_args["temperature"], version) for output in outputs]
        check_trainable(rollouts)
        return rollouts

    async def close(self) -> None:
        if self._env.env_client is not None:
            await self._env.env_client.close()


def load_environments(configs: Sequence[EnvConfig], log: LogConfig) -> dict[str, TrainingEnvironment]:
    """Load every configured environment, by name.

    Call it in the main thread: verifiers installs signal handlers when an environment is made.

    Raises:
        EnvironmentFault: one does not import, fails to load, has no training rows, or shares its name with another.
    """
    vf.setup_logging(log.vf_level, json_logging=log.json_logging)
    if not sys.stderr.isatty():
        disable_progress_bars()
    # It repeats as several log lines what `_load` says in one.
    logging.getLogger("verifiers.utils.env_utils").setLevel(logging.CRITICAL)
    environments: dict[str, TrainingEnvironment] = {}
    for index, config in enumerate(configs):
        name = config.name or config.id
        if name in environments:
            raise EnvironmentFault(
                f"orchestrator.env[{index}]: the name {name!r} is taken; give it a `name` of its own"
            )
        environments[name] = _load(config, name, f"orchestrator.env[{index}]")
    return environments


def environment_arguments(extra_env_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Attributes to set on an environment; what the config calls `seq_len` is `max_seq_len` to verifiers."""
    return {"max_seq_len" if name == "seq_len" else name: value for name, value in extra_env_kwargs.items()}


def module_id(env_id: str) -> str:
    """The id without its `@version`, as verifiers imports it."""
    return env_id.partition("@")[0]


def _load(config: EnvConfig, name: str, place: str) -> TrainingEnvironment:
    try:
        env = vf.load_environment(module_id(config.id), **config.args)
    except ValueError as error:  # verifiers turns every failed import into one
        raise EnvironmentFault(
            f"{place}: environment {config.id!r} does not import: {error.__cause__ or error}; "
            "install its package into this Python environment, or correct `id`"
        ) from error
    except Exception as error:  # an environment's own code may raise anything
        raise EnvironmentFault(f"{place}: {_one_line(error)}") from error
    try:
        env.set_kwargs(**environment_arguments(config.extra_env_kwargs))
        environment = TrainingEnvironment(name, env, config.address)
    except Exception as error:  # building the dataset is the environment's own code
        raise EnvironmentFault(
            f"{place}: the dataset of environment {config.id!r} fails: {_one_line(error)}"
        ) from error
    if not len(environment):
        raise EnvironmentFault(f"{place}: environment {config.id!r} has no training rows")
    return environment


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
