"""Finds environments and functions that the config names, and faults in the arguments of built-in ones."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from prime_rl.checks.start_dir import NotInstalled, StartDir, looks_like_path
from prime_rl.configs.optim import OptimizerConfig
from prime_rl.configs.rollouts.environments import EXTERNAL, ROW_FILES, EnvConfig
from prime_rl.configs.shared import MonitorConfig
from prime_rl.configs.storage import is_on_s3
from prime_rl.environments.adapters.options import READERS
from prime_rl.environments.builtin import BUILT_IN, built_in_module, missing_package
from prime_rl.environments.rewards.registry import RewardFault, resolve
from prime_rl.environments.rows.arguments import RowsConfig, read_rows_config
from prime_rl.interpreters import Registry, python_of, venv_of_project
from prime_rl.utils.errors import RunError, UserError
from prime_rl.utils.files import missing_advice
from prime_rl.utils.imports import module_and_name
from prime_rl.utils.pydantic_config import ConfigError
from prime_rl.utils.rows import kind_of
from prime_rl.utils.terminal import tell


def optimizer_fault(key: str, optimizer: OptimizerConfig, start: StartDir) -> str | None:
    """That the package of an optimizer is not installed."""
    if optimizer.type != "adamw8bit" or not start.has_our_packages or importlib.util.find_spec("bitsandbytes"):
        return None
    advice = "install it with `uv sync --inexact --extra quantization`"
    return NotInstalled(f"{key}.type = {optimizer.type!r} needs the package bitsandbytes: {advice}")


# Arguments of built-in environments.


_ORIGIN = "args: "


def is_built_in(env_id: str) -> bool:
    """Whether an environment of this id comes with the engine."""
    return env_id in BUILT_IN


def built_in_faults(key: str, env: EnvConfig, start: StartDir) -> Iterator[str]:
    """One line for each argument of a built-in environment that it refuses, and for each file that is missing."""
    module = built_in_module(env.id) or ""
    if start.has_our_packages and (fault := missing_package(module)) is not None:
        yield start.no_environment(f"{key}.id = {env.id!r}: {fault}")
    if (check := _CHECKS.get(module)) is not None:
        yield from (f"{key}.args: {fault}" for fault in check(env.args, start))
    if (read := READERS.get(module)) is not None:
        yield from (f"{key}.args: {fault}" for fault in _option_faults(env.args, read))


def _rows_faults(args: Mapping[str, Any], start: StartDir) -> Iterator[str]:
    try:
        config = read_rows_config(args)
    except ConfigError as error:
        yield from (fault.removeprefix(_ORIGIN) for fault in error.faults)
        return
    yield from _reward_faults(config, start)
    for name in ("datasets", "eval_datasets"):
        for index, dataset in enumerate(getattr(config, name)):
            key = f"{name}.{index}"
            is_file = dataset.path is not None and (looks_like_path(dataset.path) or kind_of(Path(dataset.path)))
            if dataset.path is not None and is_file:
                yield from _missing(f"{key}.path", dataset.path, start)
            for field, file in (("order", dataset.order), ("pass_rates", dataset.pass_rates)):
                if file is not None:
                    yield from _missing(f"{key}.{field}", str(file), start)


def _option_faults(args: Mapping[str, Any], read: Callable[[Mapping[str, Any]], object]) -> Iterator[str]:
    try:
        read(args)
    except ConfigError as error:
        yield from (fault.removeprefix(_ORIGIN) for fault in error.faults)


def _reward_faults(config: RowsConfig, start: StartDir) -> Iterator[str]:
    lists = [config.rewards, *(each.rewards for each in (*config.datasets, *config.eval_datasets))]
    faults: dict[str, None] = {}  # several datasets may name the same reward
    for spec in (spec for specs in lists for spec in specs or ()):
        try:
            resolve(spec, start.path)
        except RewardFault as fault:
            faults[f"rewards: {fault}"] = None
    yield from faults


def _missing(key: str, name: str, start: StartDir) -> Iterator[str]:
    if is_on_s3(name) or not start.lacks(name):
        return
    yield f"{key} = {name}: no such file or directory{missing_advice(name, start.path)}"


_CHECKS: Mapping[str, Callable[[Mapping[str, Any], StartDir], Iterator[str]]] = {
    "prime_rl.environments.rows.single_turn": _rows_faults,
}
"""By module."""

LOADER = "load_environment"
"""The function that verifiers calls in an environment's module."""

SINK_PACKAGES = {
    "tensorboard": ("tensorboard",),
    "trackio": ("trackio",),
    "swanlab": ("swanlab",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
"""Package that each sink of `[monitor]` imports."""

_FIND = """
import sys
from importlib.util import find_spec
sys.exit("older than 3.10") if sys.version_info < (3, 10) else None
sys.path[:] = filter(None, sys.path)
print(*[name for name in sys.argv[1:] if find_spec(name) is None])
"""
"""Prints the arguments that name no installed top-level module. It imports nothing, and ignores the current directory
as the environment's process does."""
_FIND_LIMIT_S = 60.0

_HIDING_NAMES = ("__getattr__", "globals", "setattr", "exec")
"""A module that uses one of these may have names that its source does not show."""


def environment_module(env_id: str) -> str:
    """The module that verifiers imports for an environment's id, which may end in `@version`."""
    return built_in_module(env_id) or env_id.partition("@")[0].replace("-", "_").rpartition("/")[2]


def environment_faults(key: str, envs: Sequence[EnvConfig], start: StartDir) -> Iterator[str]:
    """One line for each environment that is not installed, or is built in and refuses its arguments."""
    for index, env in enumerate(envs):
        if env.python is None and env.project is None and env.address is None:
            yield from built_in_faults(f"{key}[{index}]", env, start)
    for index, env in enumerate(envs if start.has_our_packages else ()):
        if env.is_agent:
            yield from (f"{key}[{index}].{fault}" for fault in _agent_faults(env, start))
            continue
        module = environment_module(env.id)
        if env.python is not None or env.project is not None:
            if (fault := _own_interpreter_fault(env, start, "verifiers", module)) is not None:
                yield f"{key}[{index}]: {fault}"
            continue
        place = f"{key}[{index}].id = {env.id!r}"
        is_installed, fault = _installed_by_command(env.id)
        if fault:
            yield f"{place}: {fault}"
        if is_installed or fault:
            continue
        spec = find_module(module)
        if spec is None:
            yield start.no_environment(
                f"{place}: no module named {module!r}; install the environment's package with "
                f"`medarc_train env install PATH`, or correct the id{_nearest_id(env.id)}"
            )
        elif lacks_name(spec, LOADER):
            yield f"{place}: {spec.origin} is not an environment: it has no {LOADER}"


def _nearest_id(env_id: str) -> str:
    """Names the installed or built-in environment with the most similar id, if there is one."""
    known = {*BUILT_IN, *(each.id for each in Registry().all())}
    near = get_close_matches(env_id.partition("@")[0].lower().replace("_", "-"), sorted(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _agent_faults(env: EnvConfig, start: StartDir) -> Iterator[str]:
    """Missing modules of an agent or a workflow. Imports neither."""
    keys = env.agent_keys
    targets = {} if keys.target == EXTERNAL else {"workflow": keys.target}
    datasets = {"agent_dataset": keys.dataset, "agent_eval_dataset": keys.eval_dataset}
    for name, dataset in datasets.items():
        if dataset is not None and not dataset.endswith(ROW_FILES):
            targets[name] = dataset
        elif dataset is not None and start.lacks(dataset):
            yield f"{name} = {dataset!r}: no such file{missing_advice(dataset, start.path)}"
    for name, target in targets.items():
        module, found = module_and_name(target)
        spec = _module_in(start.find(Path()), module)
        if name == "workflow" and (env.python is not None or env.project is not None):
            needed = module.partition(".")[0] if spec is None else "asyncio"  # a module here needs Python alone
            if (fault := _own_interpreter_fault(env, start, needed)) is not None:
                yield fault
            if spec is None or fault is not None:
                continue
        spec = spec or find_module(module)
        if spec is None:
            yield f"{name} = {target!r}: no module named {module!r}; start in its directory, or install its package"
        elif lacks_name(spec, found.partition(".")[0]):
            yield f"{name} = {target!r}: {spec.origin} has no {found.partition('.')[0]!r}"


def _module_in(directory: Path, name: str) -> ModuleSpec | None:
    """A module below a directory, whose folders need no `__init__.py`: agents are found from where a run starts."""
    place = directory.joinpath(*name.split("."))
    files = [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    return importlib.util.spec_from_file_location(name, files[0].absolute()) if files else None


def _own_interpreter_fault(env: EnvConfig, start: StartDir, *modules: str) -> str | None:
    """Why an environment cannot be loaded in its own interpreter, which is made if it is a project's."""
    if env.project is None:
        assert env.python is not None
        return interpreter_fault(env.python, *modules)
    try:
        return interpreter_fault(python_of(venv_of_project(start.find(env.project), tell)), *modules)
    except RunError as error:
        return f"project = {str(env.project)!r}: {error}"


def _installed_by_command(env_id: str) -> tuple[bool, str]:
    """Whether `medarc_train env install` has installed an environment, and what is wrong with it."""
    try:
        found = Registry().find(env_id)
    except UserError as fault:
        return False, str(fault)
    if found is None or found.is_whole:
        return found is not None, ""
    return True, f"its files in {found.directory} are gone: run `medarc_train env install {found.source}` again"


def interpreter_fault(python: Path, *modules: str) -> str | None:
    """Why modules cannot be loaded in another interpreter, apart from what their code does. Takes 0.1 s."""
    if not os.access(python, os.X_OK) or python.is_dir():
        return (
            f"python = {str(python)!r} is not a program: give the path of an interpreter, such as env/.venv/bin/python"
        )
    try:
        found = subprocess.run(
            [str(python), "-c", _FIND, *modules],
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_FIND_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"python = {str(python)!r} does not run: {error}"
    if found.returncode != 0:
        last = (found.stderr.strip().splitlines() or ["no output"])[-1]
        return f"python = {str(python)!r} is not Python 3.10 or later: {last}"
    missing = found.stdout.split()
    if not missing:
        return None
    names = " and ".join(repr(name) for name in missing)
    return f"{python} has no module named {names}: install the environment's package there"


def monitor_faults(monitor: MonitorConfig, start: StartDir) -> Iterator[str]:
    """One line for each sink of `[monitor]` whose package is not installed."""
    for sink, section in monitor if start.has_our_packages else ():
        packages = SINK_PACKAGES[sink] if section is not None else ()
        for package in packages:
            if find_module(package) is None:
                line = (
                    f"[monitor.{sink}] needs the package {package}: install it with `uv sync --inexact --extra {sink}`"
                )
                yield NotInstalled(line)
                break


def function_fault(key: str, import_path: str, start: StartDir) -> str | None:
    """Why the function at `import_path` cannot be imported, as far as its source shows."""
    if not start.has_our_packages:
        return None
    module, name = module_and_name(import_path)
    spec = find_module(module, start.path)
    if spec is None:
        return (
            f"{key} = {import_path!r}: no module named {module!r}: put {module.replace('.', '/')}.py where the run "
            "starts, or install its package"
        )
    if lacks_name(spec, name):
        return f"{key} = {import_path!r}: {spec.origin} has no {name}"
    return None


def find_module(name: str, directory: Path | None = None) -> ModuleSpec | None:
    """The module of a dotted name, looked for in `directory` first. Imports nothing, not even its parent packages."""
    top, *parts = name.split(".")
    spec = None if directory is None else PathFinder.find_spec(top, [str(directory.absolute())])
    spec = spec or _installed(top)
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # By its own name: with a dotted one, folders without `__init__.py` ask for their parent in `sys.modules`.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec


def lacks_name(spec: ModuleSpec, name: str) -> bool:
    """Whether a module's source is available and binds `name` nowhere, so that the name certainly does not exist."""
    return spec.origin is not None and lacks_name_in(Path(spec.origin), name)


def lacks_name_in(file: Path, name: str) -> bool:
    """The same for the source of a module."""
    if file.suffix != ".py":
        return False
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # importing it will say more
        return False
    bound = set(_names(tree))
    return name not in bound and bound.isdisjoint(("*", *_HIDING_NAMES))


def _names(tree: ast.Module) -> Iterator[str]:
    """Every name that the source defines, imports, assigns or uses."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Name():
                yield node.id
            case ast.alias():
                yield node.asname or node.name.partition(".")[0]


def _installed(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        return None
