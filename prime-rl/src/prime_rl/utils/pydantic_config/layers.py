"""Where values come from: one nested table for each source, merged from weak to strong."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prime_rl.utils.pydantic_config.errors import ConfigError, ConfigWarning
from prime_rl.utils.pydantic_config.schema import (
    Section,
    find_field,
    sections_below,
    sections_of,
    tag_of,
    union_fields,
)

KeyPath = tuple[str | int, ...]
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Layer:
    """The values of one source, and how to call the place where each was written."""

    name: str
    """A file; or what to say where no better origin is known."""
    data: dict[str, Any]
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
    """A flag or an environment variable, by the path that it sets."""

    def origin(self, path: KeyPath) -> str:
        """Where the value at `path` (or the nearest table around it) was written."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return self.name

    def holds(self, path: KeyPath) -> bool:
        return value_at(self.data, path, _ABSENT) is not _ABSENT


def value_at(data: Any, path: KeyPath, default: Any = None) -> Any:
    """The item of nested dicts and lists at `path`, or `default`."""
    for key in path:
        in_list = isinstance(data, list) and isinstance(key, int) and key < len(data)
        if not in_list and not (isinstance(data, dict) and key in data):
            return default
        data = data[key]
    return data


def set_at(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set a nested key. Tables are made on the way; a table set onto a table is merged with it."""
    for key in path[:-1]:
        child = data.get(key)
        data[key] = child if isinstance(child, dict) else {}
        data = data[key]
    data[path[-1]] = merged(data.get(path[-1]), value)


def merged(weak: Any, strong: Any) -> Any:
    """`strong` over `weak`: tables key by key at every depth, anything else (lists too) whole."""
    if not (isinstance(weak, dict) and isinstance(strong, dict)):
        return strong
    return weak | {key: merged(weak.get(key), value) for key, value in strong.items()}


def merge_layers(root: Section, layers: Iterable[Layer]) -> dict[str, Any]:
    """One table of all layers of a config; later ones win.

    A layer that changes the `type` of a union drops the keys that weaker layers set for the type before, with a
    `ConfigWarning`. Keys that both types have stay.
    """
    result: dict[str, Any] = {}
    below: list[Layer] = []
    for layer in layers:
        change = _TypeChange(layer, below)
        result = merged(change.without_old_keys((root,), result, layer.data, ()), layer.data)
        below.append(layer)
    return result


@dataclass(frozen=True, slots=True)
class _TypeChange:
    """What one layer's `type`s mean for the keys of the layers below it."""

    layer: Layer
    below: Sequence[Layer]

    def without_old_keys(self, owners: tuple[Section, ...], weak: Any, strong: Any, path: KeyPath) -> Any:
        """The table `weak` (at `path`, of one of `owners`) without the keys that `strong` makes meaningless."""
        if not (isinstance(weak, dict) and isinstance(strong, dict)):
            return weak
        kept = dict(weak)
        for name in weak.keys() & strong.keys():
            kept[name] = self.without_old_keys(sections_below(owners, name), weak[name], strong[name], (*path, name))
            union = next((owner for owner in owners if name in union_fields(owner)), None)
            if union is not None:
                kept[name] = self._of_one_type(union, name, kept[name], strong[name], (*path, name))
        return kept

    def _of_one_type(self, owner: Section, name: str, weak: Any, strong: Any, path: KeyPath) -> Any:
        if not (isinstance(weak, dict) and isinstance(strong, dict) and "type" in strong):
            return weak
        variants = {tag_of(variant): variant for variant in sections_of(owner.model_fields[name])}
        old, new = weak.get("type", union_fields(owner)[name]), strong["type"]
        if old == new or old not in variants or new not in variants:
            return weak
        dropped = [
            key for key in weak if find_field(variants[old], key) is not None and find_field(variants[new], key) is None
        ]
        if dropped:
            places = dict.fromkeys(self._origin_below((*path, key)) for key in dropped)
            union = ".".join(str(part) for part in path)
            warnings.warn(
                f"{self.layer.origin((*path, 'type'))}: {union}.type = {new!r} replaces {old!r}; ignored: "
                f"{', '.join(f'{union}.{key}' for key in dropped)} ({', '.join(places)})",
                ConfigWarning,
                stacklevel=5,
            )
        return {key: value for key, value in weak.items() if key not in dropped}

    def _origin_below(self, path: KeyPath) -> str:
        return next(layer.origin(path) for layer in reversed(self.below) if layer.holds(path))


def with_underscores(root: Section, layer: Layer) -> Layer:
    """The layer with the keys of `root` spelled with underscores; a user's own keys, of free tables, stay.

    Raises:
        ConfigError: a key is written in both spellings.
    """
    faults: list[str] = []
    data = _with_underscores((root,), layer.data, (), faults)
    if faults:
        raise ConfigError(f"{layer.name}: {fault}" for fault in faults)
    return replace(layer, data=data)


def _with_underscores(owners: tuple[Section, ...], value: Any, path: tuple[str, ...], faults: list[str]) -> Any:
    if isinstance(value, list) and owners:
        return [_with_underscores(owners, item, (*path, str(at)), faults) for at, item in enumerate(value)]
    if not isinstance(value, dict) or not owners:
        return value
    table: dict[str, Any] = {}
    for key, item in value.items():
        ours = key.replace("-", "_")
        known = any(match and match[0] == ours for match in (find_field(owner, ours) for owner in owners))
        name = ours if known else key
        if name in table:
            faults.append(f"{'.'.join((*path, name))}: is written twice, with dashes and with underscores: remove one")
        table[name] = _with_underscores(sections_below(owners, name), item, (*path, name), faults)
    return table
