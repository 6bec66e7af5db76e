"""Compares the config of a run that resumes with the one that its checkpoint was made with."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prime_rl.configs.surface.resuming import ResumeRule, rule_for
from prime_rl.run.paths import RunPaths
from prime_rl.utils.pydantic_config import BaseSettings, ConfigWarning, to_toml
from prime_rl.utils.tables import dotted, leaves

UNSET = "unset"
_COMPONENTS = ("orchestrator", "inference")
"""Other components whose configs a checkpoint of the trainer holds."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key with another value than the checkpoint was made with."""

    key: str
    was: str
    now: str
    rule: ResumeRule
    is_refused: bool

    def __str__(self) -> str:
        return f"{self.key} {self.was} -> {self.now}"

    @property
    def becomes(self) -> str:
        """What a resume does with the new value: `applied`, `refused` or `without effect`."""
        if self.is_refused:
            return "refused"
        return "without effect" if self.rule.effect == "none" else "applied"


@dataclass(frozen=True, slots=True)
class Changes:
    """What changed since the checkpoint of `step`."""

    step: int
    changes: tuple[Change, ...]
    unreadable: tuple[str, ...] = ()
    """Why configs could not be compared."""

    def faults(self) -> Iterator[str]:
        """One line for each change that cannot be applied."""
        for change in self.changes:
            if change.is_refused:
                forced = f", or add --{_flag(change)}" if change.rule.unless else ""
                yield (
                    f"cannot resume step {self.step} with {change}: {change.rule.why}; set it back, or start a new "
                    f"run{forced}"
                )

    def lines(self) -> Iterator[str]:
        """What is applied, and what has no effect, for the log."""
        yield from self.unreadable
        applied = [change for change in self.changes if change.becomes == "applied"]
        if applied:
            yield f"applied from step {self.step}: {_listed(applied)}"
        if without := [change for change in self.changes if change.becomes == "without effect"]:
            yield f"changed without effect on the training: {_listed(without)}"


def compared_configs(config: BaseSettings) -> dict[str, BaseSettings]:
    """The configs that a resume compares, by component: the sections of an RL run, or else `config` itself."""
    names = () if type(config).component == "sft" else ("trainer", *_COMPONENTS)
    sections = {name: section for name in names if (section := getattr(config, name, None)) is not None}
    return sections or {type(config).component: config}


def changes_since(paths: RunPaths, step: int, configs: Mapping[str, BaseSettings]) -> Changes:
    """Compare `configs`, by component, with those in the checkpoint of `step`. Keys of several name their component.

    A component that the checkpoint has no config of is left out; checkpoints of older versions have none.
    """
    several = len(configs) > 1
    found: list[Change] = []
    unreadable = []
    for component, config in configs.items():
        file = paths.saved_config(step, component)
        if not file.is_file():
            continue
        try:
            saved = _validated(type(config), tomllib.loads(file.read_text(encoding="utf-8")))
        except (ValidationError, tomllib.TOMLDecodeError, UnicodeDecodeError):
            unreadable.append(f"{file} does not load with this version: changed keys of {component} are not listed")
            continue
        found += _changes(component, saved, config, f"{component}." if several else "")
    return Changes(step, tuple(found), tuple(unreadable))


def configs_to_save(paths: RunPaths, component: str, config: BaseSettings) -> dict[str, str]:
    """TOML of the configs that a checkpoint keeps: the trainer's own, and what the launcher wrote for the others."""
    files = {name: paths.config(name) for name in _COMPONENTS} if component == "trainer" else {}
    others = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    return {component: to_toml(config), **others}


def _validated(config_cls: type[BaseSettings], table: dict[str, Any]) -> BaseSettings:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return config_cls.model_validate(table)


def _changes(component: str, saved: BaseSettings, config: BaseSettings, prefix: str) -> Iterator[Change]:
    was, now = (_by_key(each.model_dump()) for each in (saved, config))
    given = {key: value for key, value in now.items() if value is True}
    for key in dict.fromkeys((*was, *now)):
        if _is_below(key, was) or _is_below(key, now):
            continue  # the table as a whole was added or removed
        before, after = (_shown(key, values) for values in (was, now))
        rule = rule_for(component, key)
        if before != after and rule.effect != "attempt":
            is_refused = rule.effect == "refused" and rule.unless not in given
            yield Change(f"{prefix}{key}", before, after, rule, is_refused)


def _by_key(table: Mapping[str, Any]) -> dict[str, Any]:
    return {dotted(path): value for path, value in leaves(table)}


def _is_below(key: str, values: Mapping[str, Any]) -> bool:
    """Whether a table around `key` is a value, as None is."""
    parts = key.split(".")
    return any(".".join(parts[:length]) in values for length in range(1, len(parts)))


def _shown(key: str, values: Mapping[str, Any]) -> str:
    if key not in values:
        return "set" if any(other.startswith(f"{key}.") for other in values) else UNSET
    value = values[key]
    return str(value) if isinstance(value, Path | str) else UNSET if value is None else repr(value)


def _flag(change: Change) -> str:
    component = change.key.split(".")[0]
    prefix = f"{component}." if component in ("trainer", *_COMPONENTS) else ""
    return f"{prefix}{change.rule.unless}".replace("_", "-")


def _listed(changes: list[Change]) -> str:
    return ", ".join(f"{change} ({change.rule.why})" if change.rule.why else str(change) for change in changes)
