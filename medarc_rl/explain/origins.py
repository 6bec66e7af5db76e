"""Finds where each value of a config was set, what it overrode, and which rule derived it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel

from medarc_rl.migrate.text import split_statements
from prime_rl.utils.pydantic_config import BaseSettings
from prime_rl.utils.pydantic_config.base import Derivation, recorded_derivations
from prime_rl.utils.pydantic_config.layers import Layer, value_at
from prime_rl.utils.pydantic_config.load import ConfigSources
from prime_rl.utils.tables import KeyPath

ConfigT = TypeVar("ConfigT", bound=BaseSettings)
OURS = "this command"
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that somebody wrote."""

    value: Any
    place: str
    """`file:line`, an option, or an environment variable."""


@dataclass(frozen=True, slots=True)
class Explained:
    """A value of a config, and how it came about."""

    path: KeyPath
    value: Any
    section: type[BaseModel]
    """The class whose field it is."""
    written: tuple[Setting, ...]
    """What was written for it, the strongest first."""
    rule: str | None
    """The rule that set the value, if it is neither written nor the default."""

    @property
    def key(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def is_of_interest(self) -> bool:
        """Whether the user wrote it, or something else made it differ from the default."""
        default = self.section.model_fields[str(self.path[-1])].get_default(call_default_factory=True)
        return any(setting.place != OURS for setting in self.written) or self.value != default

    @property
    def origin(self) -> str:
        if self.rule is not None:
            return f"follows: {self.rule}"
        return self.written[0].place if self.written else "default"

    @property
    def overridden(self) -> tuple[Setting, ...]:
        """What was written for it and has no effect."""
        return self.written if self.rule is not None else self.written[1:]


def explained_config(sources: ConfigSources[ConfigT]) -> tuple[ConfigT, list[Explained]]:
    """Build a config from its sources, and explain each of its values in the order of its classes.

    Raises:
        ConfigError: the config has faults.
    """
    with recorded_derivations() as derivations:
        config = sources.build()
    derived = _by_path(config, derivations)
    values = [
        Explained(path, value, section, tuple(_written(path, sources.layers)), derived.get(path))
        for path, value, section in leaves(config)
    ]
    keys = {each.key for each in values}
    return config, [_with_rule_above(each, derived, keys) for each in values]


def leaves(config: BaseModel, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, type[BaseModel]]]:
    """Every value of a config that is not a section: its path, itself, and the class whose field it is."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        items = value if isinstance(value, list) else []
        if field.exclude:
            continue
        if isinstance(value, BaseModel):
            yield from leaves(value, (*path, name))
        elif items and all(isinstance(item, BaseModel) for item in items):
            for index, item in enumerate(items):
                yield from leaves(item, (*path, name, index))
        else:
            yield (*path, name), value, type(config)


def _sections(config: BaseModel, path: KeyPath = ()) -> Iterator[tuple[BaseModel, KeyPath]]:
    yield config, path
    for name in type(config).model_fields:
        value = getattr(config, name)
        for index, item in enumerate(value) if isinstance(value, list) else ():
            if isinstance(item, BaseModel):
                yield from _sections(item, (*path, name, index))
        if isinstance(value, BaseModel):
            yield from _sections(value, (*path, name))


def _by_path(config: BaseModel, derivations: Sequence[Derivation]) -> Mapping[KeyPath, str]:
    """The last rule for each path. Rules of sections that were built and discarded are left out."""
    paths = {id(section): path for section, path in _sections(config)}
    found: dict[KeyPath, str] = {}
    for each in derivations:
        if each.model is None:
            found[tuple(each.key.split("."))] = each.because
        elif id(each.model) in paths:
            found[(*paths[id(each.model)], each.key)] = each.because
    return found


def _with_rule_above(value: Explained, derived: Mapping[KeyPath, str], keys: Collection[str]) -> Explained:
    """The value with the rule that set its whole section or list, if it has none itself and is no plain default."""
    if value.rule is not None or not value.is_of_interest:
        return value
    for length in range(len(value.path) - 1, 0, -1):
        if rule := derived.get(value.path[:length]):
            # What follows another section or list follows the same key there.
            same_key = ".".join(map(str, (rule, *value.path[length:])))
            return replace(value, rule=same_key if same_key in keys else rule)
    return value


def _written(path: KeyPath, layers: Sequence[Layer]) -> Iterator[Setting]:
    """What the sources hold for a path, the strongest first, down to one that replaces everything below it."""
    for layer in reversed(layers):
        value = value_at(layer.data, path, _ABSENT)
        if value is not _ABSENT:
            yield Setting(value, _place(layer, path))
        if _replaces(layer.data, path):
            return


def _replaces(data: Any, path: KeyPath) -> bool:
    """Whether a source holds a list or a plain value at or above the path, so that weaker sources do not count."""
    for key in path[:-1]:
        if not isinstance(data, dict) or key not in data:
            return False
        data = data[key]
        if not isinstance(data, dict):
            return True
    return False


def _place(layer: Layer, path: KeyPath) -> str:
    """The option, the variable, or the file and line that set a path."""
    if layer.text is None:
        return layer.origin(path)
    lines = _lines(layer.text)
    inside = path[len(layer.section) :]
    for length in range(len(inside), 0, -1):
        if inside[:length] in lines:
            return f"{layer.name}:{lines[inside[:length]]}"
    return layer.name


@cache
def _lines(toml: str) -> Mapping[KeyPath, int]:
    """Line number of each header and assignment of a TOML text."""
    statements = split_statements(toml).statements
    return {
        tuple(part.replace("-", "_") if isinstance(part, str) else part for part in each.path): each.line
        for each in statements
    }
