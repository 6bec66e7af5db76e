"""Checks the arguments of built-in environments, without loading anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prime_rl.checks.start_dir import StartDir, looks_like_path
from prime_rl.configs.rollouts.environments import EnvConfig
from prime_rl.configs.storage import is_on_s3
from prime_rl.environments.adapters.options import READERS
from prime_rl.environments.builtin import BUILT_IN, built_in_module, missing_package
from prime_rl.environments.rewards.registry import RewardFault, resolve
from prime_rl.environments.rows.arguments import RowsConfig, read_rows_config
from prime_rl.utils.files import missing_advice
from prime_rl.utils.pydantic_config import ConfigError
from prime_rl.utils.row_files.kinds import kind_of

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
    yield from _reward_faults(config)
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


def _reward_faults(config: RowsConfig) -> Iterator[str]:
    lists = [config.rewards, *(each.rewards for each in (*config.datasets, *config.eval_datasets))]
    for spec in {spec.fn: spec for specs in lists for spec in specs or ()}.values():
        try:
            resolve(spec)
        except RewardFault as fault:
            yield f"rewards: {fault}"


def _missing(key: str, name: str, start: StartDir) -> Iterator[str]:
    if is_on_s3(name) or not start.lacks(name):
        return
    yield f"{key} = {name}: no such file or directory{missing_advice(name, start.path)}"


_CHECKS: Mapping[str, Callable[[Mapping[str, Any], StartDir], Iterator[str]]] = {
    "prime_rl.environments.rows.single_turn": _rows_faults,
}
"""By module."""
