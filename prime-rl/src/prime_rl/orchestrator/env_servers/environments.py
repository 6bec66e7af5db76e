"""The environments: user code, loaded through verifiers and run in this process or in an `env-server`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any, Literal, Self

import verifiers as vf
from datasets import Dataset, disable_progress_bars
from verifiers.serve import ZMQEnvClient

from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.configs.shared import LogConfig
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.rollouts.images import ADVICE, first_row_with_image, has_image
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout, check_trainable, read_rollout
from prime_rl.orchestrator.scheduling.difficulty import fingerprint
from prime_rl.orchestrator.servers.server import InferenceServer

SERVER_STARTUP_TIMEOUT_S = 600.0
STATE_COLUMNS = ["trajectory", "sampling_args"]
Split = Literal["train", "eval"]


class Environment:
    """One environment and its rows, of training or of evaluation.

    An environment without rows for evaluation evaluates on those for training, as verifiers has it.
    """

    def __init__(self, name: str, env: vf.Environment, address: str | None, split: Split = "train") -> None:
        self.name = name
        self.address = address
        self.vf_env = env
        self._rows: Dataset = env.get_dataset() if split == "train" else env.get_eval_dataset()

    def __len__(self) -> int:
        return len(self._rows)

    def held_out(self) -> Self:
        """The same environment with its rows for evaluation."""
        return type(self)(self.name, self.vf_env, self.address, "eval")

    def refuse_images(self) -> None:
        """Raises EnvironmentFault if the prompt of a row has an image."""
        if (row := first_row_with_image(self._rows)) is not None:
            raise EnvironmentFault(f"environment {self.name!r}: the prompt of row {row} has an image, and {ADVICE}")

    def fingerprint(self, row: int, keys: Sequence[str]) -> str:
        """Tells a row from others, also in another version of the dataset."""
        return fingerprint(self.name, self._rows[row], keys)

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
        self.vf_env.env_client = client

    async def run_group(
        self, example: ExampleRef, size: int, server: InferenceServer, sampling_args: dict[str, Any], version: int
    ) -> list[Rollout]:
        """Attempt one example `size` times to train on it.

        Whatever the environment's code raises passes through.

        Raises:
            MalformedRollout: nothing that came back can be trained on.
            EnvironmentFault: the environment showed the model an image.
        """
        rollouts = await self.attempt(example, size, server, sampling_args, version)
        if any(has_image(rollout.prompt) or has_image(rollout.completion) for rollout in rollouts):
            raise EnvironmentFault(f"environment {self.name!r} shows the model images, and {ADVICE}")
        check_trainable(rollouts)
        return rollouts

    async def attempt(
        self,
        example: ExampleRef,
        size: int,
        server: InferenceServer,
        sampling_args: dict[str, Any],
        version: int,
        max_retries: int = 0,
    ) -> list[Rollout]:
        """Attempt one example `size` times and score the attempts together, whether or not they can be trained on.

        verifiers tries again up to `max_retries` times after a fault of a server or a sandbox.
        """
        outputs = await self.vf_env.run_group(
            [self._rows[example.row]] * size,
            server.client if self.vf_env.env_client is None else server.client_config,
            server.model,
            sampling_args,
            max_retries,
            state_columns=STATE_COLUMNS,
        )
        temperature = sampling_args.get("temperature", 1.0)
        return [read_rollout(output, example, temperature, version) for output in outputs]

    async def close(self) -> None:
        if self.vf_env.env_client is not None:
            await self.vf_env.env_client.close()


def load_environments(
    configs: Sequence[EnvConfig], log: LogConfig, key: str = "orchestrator.env", split: Split = "train"
) -> dict[str, Environment]:
    """Load every configured environment, by name. `key` is where the config has them.

    Call it in the main thread: verifiers installs signal handlers when an environment is made.

    Raises:
        EnvironmentFault: one does not import, fails to load, or has no rows.
    """
    setup_verifiers_logging(log)
    environments: dict[str, Environment] = {}
    for index, config in enumerate(configs):
        place = f"{key}[{index}]"
        environments[config.name or config.id] = _with_rows(load_environment(config, place), config, place, split)
    return environments


def load_environment(config: EnvConfig, place: str) -> vf.Environment:
    """The environment as verifiers knows it; its dataset may not be built yet.

    Raises:
        EnvironmentFault: it does not import, or fails to load.
    """
    try:
        env = vf.load_environment(module_id(config.id), **config.args)
        env.set_kwargs(**environment_arguments(config.extra_env_kwargs))
    except ValueError as error:  # verifiers turns every failed import into one
        raise EnvironmentFault(
            f"{place}: environment {config.id!r} does not import: {error.__cause__ or error}; "
            "install its package into this Python environment, or correct `id`"
        ) from error
    except Exception as error:  # an environment's own code may raise anything
        raise EnvironmentFault(f"{place}: {_one_line(error)}") from error
    return env


def setup_verifiers_logging(log: LogConfig) -> None:
    vf.setup_logging(log.vf_level, json_logging=log.json_logging)
    if not sys.stderr.isatty():
        disable_progress_bars()
    # It repeats as several log lines what `load_environment` says in one.
    logging.getLogger("verifiers.utils.env_utils").setLevel(logging.CRITICAL)
    # It tells of every server that it waits for one that starts.
    logging.getLogger("verifiers.serve.client").setLevel(logging.WARNING)


def environment_arguments(extra_env_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Attributes to set on an environment; what the config calls `seq_len` is `max_seq_len` to verifiers."""
    return {"max_seq_len" if name == "seq_len" else name: value for name, value in extra_env_kwargs.items()}


def module_id(env_id: str) -> str:
    """The id without its `@version`, as verifiers imports it."""
    return env_id.partition("@")[0]


def _with_rows(env: vf.Environment, config: EnvConfig, place: str, split: Split) -> Environment:
    try:
        environment = Environment(config.name or config.id, env, config.address, split)
    except Exception as error:  # building the dataset is the environment's own code
        raise EnvironmentFault(
            f"{place}: the dataset of environment {config.id!r} fails: {_one_line(error)}"
        ) from error
    if not len(environment):
        purpose = "training" if split == "train" else "evaluation"
        raise EnvironmentFault(f"{place}: environment {config.id!r} has no rows for {purpose}")
    return environment


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
