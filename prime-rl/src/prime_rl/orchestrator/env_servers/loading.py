"""Loads the environments of a config, each with the worker that its keys ask for, and refuses what cannot be used."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import disable_progress_bars

from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.configs.shared import LogConfig
from prime_rl.environments.builtin import built_in_module
from prime_rl.interpreters.in_use import use
from prime_rl.interpreters.registry import InstalledEnvironment, Registry, RegistryFault, use_shared
from prime_rl.interpreters.venvs import VenvError, python_of, venv_of_project
from prime_rl.orchestrator.agents.worker import start_agent
from prime_rl.orchestrator.env_servers.environment import Environment, Split
from prime_rl.orchestrator.env_servers.exits import contain_exits
from prime_rl.orchestrator.env_servers.in_memory import VerifiersWorker
from prime_rl.orchestrator.env_servers.overlong import record_overlong_prompts
from prime_rl.orchestrator.env_servers.port import PortWorker
from prime_rl.orchestrator.env_servers.rubrics import argument_faults, weight_faults, without_answers
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.guests.inside.judge_arguments import NoJudge, judge_arguments
from prime_rl.orchestrator.guests.inside.returned import wrong_type
from prime_rl.orchestrator.guests.inside.reward_records import record_reward_errors
from prime_rl.orchestrator.guests.process import Guest, ProcessWorker
from prime_rl.utils.logger import get_logger


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
    name = config.name or config.id
    if config.is_agent:
        return Environment(name, start_agent(config, place, python), split, config.max_failed_groups)
    if python is None:
        return _with_rows(load_environment(config, place), config, place, split)
    attributes = environment_arguments(config.extra_env_kwargs)
    tables = (config.taskset, config.agent)
    guest = Guest(place, python, module_id(config.id), config.args, attributes, config.judge, *tables)
    worker = ProcessWorker.start(name, guest)
    try:
        environment = Environment(name, worker, split, config.max_failed_groups)
    except BaseException:
        worker.guest.kill()
        raise
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
    name = config.name or config.id
    worker = VerifiersWorker(env) if config.address is None else PortWorker(name, env, config.address)
    try:
        environment = Environment(name, worker, split, config.max_failed_groups)
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
