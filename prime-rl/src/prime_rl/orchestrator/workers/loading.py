"""Loads the environments of a config, each with the worker that its keys ask for, and refuses what cannot be used."""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import disable_progress_bars
from verifiers.types import TASK_INPUT_FIELDS

from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.configs.shared import LogConfig
from prime_rl.environments.builtin import built_in_module
from prime_rl.interpreters import InstalledEnvironment, Registry, python_of, use, use_shared, venv_of_project
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.workers.agents import start_agent
from prime_rl.orchestrator.workers.environment import Environment, Split, Worker
from prime_rl.orchestrator.workers.in_memory import VerifiersWorker
from prime_rl.orchestrator.workers.inside.judge_arguments import NoJudge, judge_arguments
from prime_rl.orchestrator.workers.inside.reward_records import leaves
from prime_rl.orchestrator.workers.inside.verifiers_api import Served, WrongType, load, wrong_type
from prime_rl.orchestrator.workers.port import PortClient
from prime_rl.orchestrator.workers.process import ProcessWorker, WorkerSpec
from prime_rl.orchestrator.workers.remote import RemoteWorker
from prime_rl.utils.errors import RunError, UserError, one_line
from prime_rl.utils.logger import get_logger

_OF_ROLLOUT = ("prompt", "completion", "answer", "state", "task", "info")
_OF_GROUP = ("prompts", "completions", "answers", "states", "tasks", "infos")
_SCORING = ("_call_individual_reward_func", "_call_group_reward_func", "score_objects", "group_score_objects")
"""Methods of verifiers 0.1.14 that choose a reward function's arguments by their names."""
_OPTIONAL = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


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
    module = module_id(config.id)
    spec = WorkerSpec(place, python, module, config.args, attributes, config.judge, *tables, threads=config.threads)
    worker = ProcessWorker.start(name, spec, config.num_workers or 1)
    try:
        environment = Environment(name, worker, split, config.max_failed_groups)
    except BaseException:
        worker.process.kill()
        raise
    _refuse_empty(environment, config, place, split)
    return environment


def _own_interpreter(config: EnvConfig, place: str) -> Path | None:
    if config.project is None:
        return config.python or _installed_python(config, place)
    try:
        return python_of(venv_of_project(config.project))
    except RunError as error:
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
    except UserError as fault:
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


def load_environment(config: EnvConfig, place: str) -> Served:
    """Load a verifiers environment. Its dataset may be built later. `place` is its config key, for error messages.

    Raises:
        EnvironmentFault: the environment cannot be imported, or fails to load.
    """
    installed = _installed(config, place)
    if installed is not None and not installed.has_interpreter:
        use_shared(installed)
    module = module_id(config.id)
    try:
        args = {**judge_arguments(module, config.judge), **config.args}
        attributes = environment_arguments(config.extra_env_kwargs)
        return load({"module": module, "args": args, "attributes": attributes, "threads": config.threads})
    except ValueError as error:  # verifiers turns every failed import into one
        raise EnvironmentFault(
            f"{place}: environment {config.id!r} does not import: {error.__cause__ or error}; "
            f"{_import_advice(error, module)}"
        ) from error
    except NoJudge as error:
        raise EnvironmentFault(f"{place}: {error}") from error
    except SystemExit as error:
        raise EnvironmentFault(f"{place}: environment {config.id!r} does not load: {one_line(error)}") from error
    except WrongType as error:
        raise EnvironmentFault(f"{place}: environment {config.id!r} does not load: {error}") from error
    except Exception as error:  # an environment's own code may raise anything
        raise EnvironmentFault(f"{place}: {_reason(error)}") from error


def modules_here(configs: Sequence[EnvConfig], environments: Sequence[Environment]) -> dict[str, str]:
    """Module of each environment that runs in this process, by name."""
    return {
        environment.name: module_id(config.id)
        for config, environment in zip(configs, environments, strict=True)
        if isinstance(environment.worker, VerifiersWorker)
    }


def setup_verifiers_logging(log: LogConfig) -> None:
    vf.setup_logging(log.vf_level, json_logging=log.json_logging)
    if not sys.stderr.isatty():
        disable_progress_bars()
    # Duplicates the error message of `load_environment`.
    logging.getLogger("verifiers.utils.env_utils").setLevel(logging.CRITICAL)


def environment_arguments(extra_env_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Attributes to set on an environment. Renames `seq_len` to verifiers' `max_seq_len`."""
    return {"max_seq_len" if name == "seq_len" else name: value for name, value in extra_env_kwargs.items()}


def module_id(env_id: str) -> str:
    """The id without its `@version`, as verifiers imports it; of a built-in environment, its module."""
    return built_in_module(env_id) or env_id.partition("@")[0]


def _with_rows(served: Served, config: EnvConfig, place: str, split: Split) -> Environment:
    rubric = served.rubric
    for fault in weight_faults(rubric):
        raise EnvironmentFault(f"{place}: environment {config.id!r}: {fault}")
    name = config.name or config.id
    worker: Worker = VerifiersWorker(served)
    if config.address is not None:
        worker = RemoteWorker(name, served, PortClient(name, config.address))
    try:
        environment = Environment(name, worker, split, config.max_failed_groups)
    except (Exception, SystemExit) as error:  # building the dataset is the environment's own code
        raise EnvironmentFault(
            f"{place}: cannot build the dataset of environment {config.id!r}: {wrong_type(error) or one_line(error)}"
        ) from error
    _refuse_empty(environment, config, place, split)
    columns = list(environment.content(0))
    for fault in argument_faults(rubric, columns):
        raise EnvironmentFault(f"{place}: environment {config.id!r}: {fault}")
    if functions := without_answers(rubric, columns):
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
    return "; ".join(str(cause).splitlines()) if is_ours else one_line(error)


def weight_faults(rubric: vf.Rubric | None) -> Iterator[str]:
    """One line for each weight with which no reward would be a number."""
    for part in leaves(rubric):
        for function, weight in zip(part.funcs, part.weights, strict=True):
            if not isinstance(weight, int | float) or not math.isfinite(weight):
                name = getattr(function, "__name__", repr(function))
                yield f"the weight of reward function {name!r} is {weight!r}, not a finite number"


def argument_faults(rubric: vf.Rubric | None, columns: Collection[str]) -> Iterator[str]:
    """One line for each argument that a reward function requires and never gets, so that each of its calls would fail.

    `columns` are those of the dataset, which become arguments, too. A rubric that chooses arguments itself has none.
    """
    added = [name for name in columns if name not in TASK_INPUT_FIELDS]
    for part in leaves(rubric):
        own = [name for name in _SCORING if getattr(type(part), name) is not getattr(vf.Rubric, name)]
        if own or part.score_object_providers or part.group_score_object_providers:
            continue
        for function in part.funcs:
            base = _OF_GROUP if part._is_group_func(function) else (*_OF_ROLLOUT, *added)
            known = dict.fromkeys((*base, *part.class_objects))
            for each in inspect.signature(function).parameters.values():
                if each.name not in known and each.default is each.empty and each.kind not in _OPTIONAL:
                    near = get_close_matches(each.name, known, 1)
                    meant = f" (did you mean {near[0]!r}?)" if near else ""
                    name = getattr(function, "__name__", repr(function))
                    yield f"reward function {name!r} requires {each.name!r}{meant}, and gets only {', '.join(known)}"


def without_answers(rubric: vf.Rubric | None, columns: Collection[str]) -> list[str]:
    """Reward functions that require `answer` in an environment whose rows have none, and so always get an empty one."""
    functions = [function for part in leaves(rubric) for function in part.funcs] if "answer" not in columns else []
    parameters = [(function, inspect.signature(function).parameters.get("answer")) for function in functions]
    return [
        getattr(function, "__name__", repr(function))
        for function, found in parameters
        if found is not None and found.default is found.empty
    ]
