"""Loads verifiers environments, and runs rollouts in this process or in an `env-server`."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import verifiers as vf
from datasets import Dataset, disable_progress_bars
from verifiers.serve import ZMQEnvClient

from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.configs.shared import LogConfig
from prime_rl.environments.builtin import built_in_module
from prime_rl.interpreters.in_use import use
from prime_rl.interpreters.registry import InstalledEnvironment, Registry, RegistryFault, use_shared
from prime_rl.interpreters.venvs import VenvError, python_of, venv_of_project
from prime_rl.monitors.tracing import own_trace
from prime_rl.orchestrator.env_servers.exits import contain_exits
from prime_rl.orchestrator.env_servers.failures import Failures, refuse_failed
from prime_rl.orchestrator.env_servers.group_limits import in_time
from prime_rl.orchestrator.env_servers.overlong import record_overlong_prompts
from prime_rl.orchestrator.env_servers.reward_errors import record_reward_errors
from prime_rl.orchestrator.env_servers.rubrics import argument_faults, reward_functions, weight_faults, without_answers
from prime_rl.orchestrator.env_servers.server_life import ServerLives
from prime_rl.orchestrator.env_servers.tunnel import Tunnel
from prime_rl.orchestrator.errors import EnvironmentFault, GroupFailed
from prime_rl.orchestrator.guests.inside.judge_arguments import NoJudge, judge_arguments
from prime_rl.orchestrator.guests.inside.returned import wrong_type
from prime_rl.orchestrator.reports.sessions import record_rollouts
from prime_rl.orchestrator.rollouts.images import ADVICE, first_row_with_image, has_image
from prime_rl.orchestrator.rollouts.rollout import (
    OVERLONG_PROMPT,
    REWARD_ERRORS,
    ExampleRef,
    Rollout,
    check_trainable,
    read_rollout,
)
from prime_rl.orchestrator.scheduling.buffer import fingerprint
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.run.beats import own_beats, server_name
from prime_rl.transport.endpoints import Endpoint
from prime_rl.transport.errors import TransportError
from prime_rl.utils.logger import get_logger

SERVER_STARTUP_TIMEOUT_S = 600.0
STATE_COLUMNS = ["trajectory", "sampling_args", REWARD_ERRORS, OVERLONG_PROMPT]
PROMPT_ID_LENGTH = 16
"""Hexadecimal digits of a prompt's hash."""
Split = Literal["train", "eval"]
_ERROR_NAME = re.compile(r"(?:\w+\.)*(\w+)[(:]")
"""The class that an error's text begins with."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Attempts at one example, which are scored together."""

    example: ExampleRef
    size: int
    server: InferenceServer
    sampling_args: dict[str, Any]
    version: int
    """Policy version at submission."""
    max_retries: int = 0

    @property
    def temperature(self) -> float:
        return float(self.sampling_args.get("temperature", 1.0))


class Environment:
    """One environment with its training rows or its evaluation rows.

    An environment without evaluation rows uses its training rows, as in verifiers.
    """

    def __init__(
        self,
        name: str,
        env: vf.Environment,
        address: str | None,
        split: Split = "train",
        max_failed_groups: float = 0.5,
    ) -> None:
        self.name = name
        self.address = address
        self._is_elsewhere = address is not None  # somebody else's server: its model calls are not seen here
        self.vf_env = env
        self.timeout_s: float | None = None
        """Longest time of a group, as in the config."""
        self.vocab_size: int | None = None
        """That of the trained model, if it is known: no rollout may have other tokens."""
        self._tunnel: Tunnel | None = None
        self._server_lives = ServerLives()
        self._rows: Dataset = env.get_dataset() if split == "train" else env.get_eval_dataset()

        self.failures = Failures(name, max_failed_groups)
        self.reward_functions = reward_functions(env.rubric)
        """Weight of each reward function, by name; 0 for one that is only measured."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_rows(self) -> int | None:
        """None if the environment makes rows without end, as they are drawn."""
        return len(self)

    def held_out(self) -> Self:
        """The same environment with its evaluation rows."""
        other = type(self)(self.name, self.vf_env, self.address, "eval", self.failures.max_share)
        other.timeout_s = self.timeout_s
        other._server_lives = self._server_lives  # it has the same server
        return other

    def content(self, row: int) -> dict[str, Any]:
        """All columns of a row."""
        return dict(self._rows[row])

    def prompt(self, row: int) -> Any:
        """The prompt of a row: messages, or text."""
        return self.content(row)["prompt"]

    def tools(self, row: int) -> list[dict[str, Any]]:
        """The tools that the environment offers in a row, as the engine receives them."""
        info = self._rows[row].get("info") or {}
        info = json.loads(info) if isinstance(info, str) else info
        tools = info.get("tool_defs") or self.vf_env.tool_defs or []
        plain = (tool if isinstance(tool, Mapping) else tool.model_dump(exclude_none=True) for tool in tools)
        return [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in plain]

    def refuse_images(self) -> None:
        """Raises EnvironmentFault if the prompt of a row has an image."""
        if (row := first_row_with_image(self._rows)) is not None:
            raise EnvironmentFault(f"environment {self.name!r}: the prompt of row {row} has an image, and {ADVICE}")

    def fingerprint(self, row: int, keys: Sequence[str]) -> str:
        """Hash of a row's content, which identifies the row even if its index changes."""
        return fingerprint(self.name, self._rows[row], keys)

    def prompt_id(self, row: int) -> str:
        """The id that the dataset gives a row's prompt, or else a hash of its prompt and answer."""
        content = self.content(row)
        own = content.get("prompt_id")
        return str(own) if own not in (None, "") else fingerprint("", content, ("prompt", "answer"))[:PROMPT_ID_LENGTH]

    def waits_for(self) -> str:
        """What running groups wait for, other than the model and the environment's own code; empty if nothing."""
        return ""

    async def connect(self) -> None:
        """Connect to the environment's server, if it has one.

        Raises:
            EnvironmentFault: the server does not answer within 600 s, or its address needs a key that is not set.
        """
        if self.address is None:
            return
        try:
            endpoint = Endpoint.of_address(self.address)
        except TransportError as error:
            raise EnvironmentFault(f"the address of environment {self.name!r}: {error}") from error
        if not endpoint.is_local:
            self._tunnel = Tunnel(endpoint)
        address = endpoint.address if self._tunnel is None else self._tunnel.address
        server = f"the server of environment {self.name!r} at {self.address}"
        get_logger().info(f"Waiting for {server} (limit: {SERVER_STARTUP_TIMEOUT_S:g} s)")
        client = ZMQEnvClient(address, name=self.name, startup_timeout=SERVER_STARTUP_TIMEOUT_S)
        try:
            await client.wait_for_server_startup()
        except TimeoutError as error:
            raise EnvironmentFault(
                f"{server} does not answer within {SERVER_STARTUP_TIMEOUT_S:g} s: start it with "
                f"`env-server --env.id ID --env.address {self.address}`"
            ) from error
        self.vf_env.env_client = client

    def server_ended(self, why: str) -> bool:
        """Fail the groups that its server had. Whether it had answered any since its start."""
        return self._server_lives.end(why)

    async def run_group(
        self, example: ExampleRef, size: int, server: InferenceServer, sampling_args: dict[str, Any], version: int
    ) -> list[Rollout]:
        """Attempt one example `size` times to train on it.

        Whatever the environment's code raises passes through.

        Raises:
            GroupFailed: a reward function failed, the environment's code ended a rollout, it took longer than
                `timeout_s`, or nothing that came back can be trained on.
            EnvironmentFault: the environment showed the model an image, or too many of its groups failed.
        """
        with self.failures.group(server.lost):
            rollouts = await self._roll_out(GroupRequest(example, size, server, sampling_args, version))
            if any(has_image(rollout.prompt) or has_image(rollout.completion) for rollout in rollouts):
                raise EnvironmentFault(f"environment {self.name!r} shows the model images, and {ADVICE}")
            refuse_failed(rollouts)
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

        verifiers retries up to `max_retries` times after a server or sandbox error. Errors of environment code
        propagate.

        Raises:
            EnvironmentFault: reward functions failed in too many groups.
            GroupTimeout: it took longer than `timeout_s` of the environment.
        """
        request = GroupRequest(example, size, server, sampling_args, version, max_retries)
        rollouts = await self._roll_out(request)
        self.failures.observe_scored(rollouts)
        return rollouts

    async def _roll_out(self, request: GroupRequest) -> list[Rollout]:
        example, server = request.example, request.server
        calling = own_beats().calling(server_name(server.base_url)) if self._is_elsewhere else contextlib.nullcontext()
        async with in_time(self.timeout_s, self.name, example.row):
            with calling, self._named_failures():
                group = self.vf_env.run_group(
                    [self._rows[example.row]] * request.size,
                    server.client if self.vf_env.env_client is None else server.client_config,
                    server.model,
                    copy.deepcopy(request.sampling_args),  # the environment may change them, for this group alone
                    request.max_retries,
                    state_columns=STATE_COLUMNS,
                )
                outputs = await self._server_lives.of(group)
        record_rollouts(own_trace(), outputs, example)
        rollouts = [
            read_rollout(output, example, request.temperature, request.version, self.vocab_size) for output in outputs
        ]
        for rollout in rollouts:
            rollout.prompt_id = self.prompt_id(example.row)
        return rollouts

    @contextlib.contextmanager
    def _named_failures(self) -> Iterator[None]:
        """verifiers' client raises a RuntimeError with the text of whatever the server's environment raised."""
        try:
            yield
        except RuntimeError as error:
            if self.vf_env.env_client is None:
                raise
            named = _ERROR_NAME.match(str(error))
            raise GroupFailed(_one_line(error), named[1] if named else "") from error

    async def close(self) -> None:
        if self.vf_env.env_client is not None:
            await self.vf_env.env_client.close()
        if self._tunnel is not None:
            self._tunnel.close()


def load_environments(
    configs: Sequence[EnvConfig], log: LogConfig, key: str = "orchestrator.env", split: Split = "train"
) -> dict[str, Environment]:
    """Load every configured environment, by name. `key` is the config key of the list, for error messages.

    Call it in the main thread: verifiers installs signal handlers when it loads an environment.

    Raises:
        EnvironmentFault: an environment cannot be imported, fails to load, or has no rows.
    """
    setup_verifiers_logging(log)
    environments: dict[str, Environment] = {}
    for index, config in enumerate(configs):
        place = f"{key}[{index}]"
        environment = environments[config.name or config.id] = _loaded(config, place, split)
        environment.timeout_s = config.timeout_s
    return environments


def _loaded(config: EnvConfig, place: str, split: Split) -> Environment:
    python = _own_interpreter(config, place)
    if config.is_agent:
        from prime_rl.orchestrator.agents.agent_environment import start_agent

        return start_agent(config, place, split, python)
    if python is None:
        return _with_rows(load_environment(config, place), config, place, split)
    from prime_rl.orchestrator.guests.guest_environment import start_guest

    environment = start_guest(config, place, split, python)
    _refuse_empty(environment, config, place, split)
    return environment


def _own_interpreter(config: EnvConfig, place: str) -> Path | None:
    if config.project is None:
        return config.python or _installed_python(config, place)
    try:
        return python_of(venv_of_project(config.project))
    except VenvError as error:
        raise EnvironmentFault(f"{place}.project = {str(config.project)!r}: {error}") from error


def _installed_python(config: EnvConfig, place: str) -> Path | None:
    """The interpreter that `medarc_train env install` gave to an environment; None if it runs in this one."""
    if config.address is not None or config.is_agent:
        return None
    found = _installed(config, place)
    return None if found is None else found.python


def _installed(config: EnvConfig, place: str) -> InstalledEnvironment | None:
    try:
        found = Registry().find(config.id)
    except RegistryFault as fault:
        raise EnvironmentFault(f"{place}: {fault}") from fault
    if found is not None:
        use(Path(found.directory))  # another `env install` leaves the files that this run uses
    return found


def _import_advice(error: ValueError, module: str) -> str:
    """What to do about a failed import, by which module is missing: the environment's own, or one that it imports."""
    cause = error.__cause__
    own = module.replace("-", "_").rpartition("/")[2]
    if isinstance(cause, ModuleNotFoundError) and cause.name not in (None, own):
        return (
            "its code imports that module: add the package that has it to `dependencies` in the environment's "
            "pyproject.toml, then run `medarc_train env install PATH` again"
        )
    return "install its package with `medarc_train env install PATH`, or correct `id`"


def load_environment(config: EnvConfig, place: str) -> vf.Environment:
    """Load a verifiers environment. Its dataset may be built later. `place` is its config key, for error messages.

    Raises:
        EnvironmentFault: the environment cannot be imported, or fails to load.
    """
    installed = _installed(config, place)
    if installed is not None and not installed.has_interpreter:
        use_shared(installed)
    try:
        given = judge_arguments(module_id(config.id), config.judge)
        env = vf.load_environment(module_id(config.id), **{**given, **config.args})
        env.set_kwargs(**environment_arguments(config.extra_env_kwargs))
    except ValueError as error:  # verifiers turns every failed import into one
        raise EnvironmentFault(
            f"{place}: environment {config.id!r} does not import: {error.__cause__ or error}; "
            f"{_import_advice(error, module_id(config.id))}"
        ) from error
    except NoJudge as error:
        raise EnvironmentFault(f"{place}: {error}") from error
    except SystemExit as error:
        raise EnvironmentFault(f"{place}: environment {config.id!r} does not load: {_one_line(error)}") from error
    except Exception as error:  # an environment's own code may raise anything
        mistake = wrong_type(error)
        reason = _reason(error) if mistake is None else f"environment {config.id!r} does not load: {mistake}"
        raise EnvironmentFault(f"{place}: {reason}") from error
    contain_exits(env)
    record_reward_errors(env.rubric)
    record_overlong_prompts(env)
    return env


def rows_to_evaluate(environment: Environment, skip_first: int, count: int) -> range:
    """`count` rows after the first `skip_first`; a negative `count` takes all.

    Raises:
        EnvironmentFault: `skip_first` skips every row, or `count` takes all of an endless environment.
    """
    size = environment.num_rows
    if size is None:
        if count < 0:
            raise EnvironmentFault(f"environment {environment.name!r} makes rows without end: set num_examples")
        return range(skip_first, skip_first + count)
    if skip_first >= size:
        raise EnvironmentFault(f"skip_first = {skip_first} leaves none of the {size} rows of {environment.name!r}")
    return range(skip_first, size if count < 0 else min(skip_first + count, size))


def setup_verifiers_logging(log: LogConfig) -> None:
    vf.setup_logging(log.vf_level, json_logging=log.json_logging)
    if not sys.stderr.isatty():
        disable_progress_bars()
    # Duplicates the error message of `load_environment`.
    logging.getLogger("verifiers.utils.env_utils").setLevel(logging.CRITICAL)
    # Logs a line for each server that it waits for.
    logging.getLogger("verifiers.serve.client").setLevel(logging.WARNING)


def environment_arguments(extra_env_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Attributes to set on an environment. Renames `seq_len` to verifiers' `max_seq_len`."""
    return {"max_seq_len" if name == "seq_len" else name: value for name, value in extra_env_kwargs.items()}


def module_id(env_id: str) -> str:
    """The id without its `@version`, as verifiers imports it; of a built-in environment, its module."""
    return built_in_module(env_id) or env_id.partition("@")[0]


def _with_rows(env: vf.Environment, config: EnvConfig, place: str, split: Split) -> Environment:
    for fault in weight_faults(env.rubric):
        raise EnvironmentFault(f"{place}: environment {config.id!r}: {fault}")
    try:
        environment = Environment(config.name or config.id, env, config.address, split, config.max_failed_groups)
    except (Exception, SystemExit) as error:  # building the dataset is the environment's own code
        raise EnvironmentFault(
            f"{place}: cannot build the dataset of environment {config.id!r}: {wrong_type(error) or _one_line(error)}"
        ) from error
    _refuse_empty(environment, config, place, split)
    columns = list(environment.content(0))
    for fault in argument_faults(env.rubric, columns):
        raise EnvironmentFault(f"{place}: environment {config.id!r}: {fault}")
    if functions := without_answers(env.rubric, columns):
        get_logger().warning(
            f"{place}: environment {config.id!r}: {', '.join(functions)} requires `answer`, and the rows have no such "
            f"column: it is always empty; the columns are {', '.join(columns)}"
        )
    return environment


def _refuse_empty(environment: Environment, config: EnvConfig, place: str, split: Split) -> None:
    if environment.num_rows == 0:
        purpose = "training" if split == "train" else "evaluation"
        raise EnvironmentFault(f"{place}: environment {config.id!r} has no {purpose} rows")


def _reason(error: Exception) -> str:
    """What our own environments raise is written for users; verifiers packs it into an error of its own."""
    cause = error.__cause__
    is_ours = cause is not None and type(cause).__module__.startswith("prime_rl.")
    return "; ".join(str(cause).splitlines()) if is_ours else _one_line(error)


def _one_line(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
