"""Merges the sources of a config, one nested table each, from weak to strong."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel

from prime_rl.utils.errors import ConfigError, ConfigWarning
from prime_rl.utils.pydantic_config.schema import (
    Section,
    find_field,
    named_below,
    sections_below,
    sections_of,
    tag_of,
    union_fields,
)
from prime_rl.utils.tables import KeyPath

_ABSENT = object()


class NoSuchItem(Exception):
    """An index is beyond the end of its list."""

    def __init__(self, path: KeyPath, count: int) -> None:
        super().__init__()
        self.path = path
        self.count = count

    def __str__(self) -> str:
        *table, index = map(str, self.path)
        items = "1 item" if self.count == 1 else f"{self.count} items"
        return f"{'.'.join(table)} has {items}, so the next index is {self.count} (got {index})"


@dataclass(frozen=True, slots=True)
class Layer:
    """The values of one source, and where each was written."""

    name: str
    """The file, or what to call the source in messages."""
    data: dict[str, Any]
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
    """The option or environment variable that set a path."""
    text: str | None = None
    """TOML text of a file. None for the other sources."""
    section: tuple[str, ...] = ()
    """Section that a file is for, as in `--trainer @ file`. Empty for the whole config."""

    @property
    def is_file(self) -> bool:
        return self.text is not None

    def origin(self, path: KeyPath) -> str:
        """Return where the value at `path`, or the nearest table around it, was written."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return self.name

    def origin_below(self, path: KeyPath) -> str:
        """Return where the first value at `path` or in it was written."""
        return next((origin for key, origin in self.origins.items() if key[: len(path)] == path), self.origin(path))

    def holds(self, path: KeyPath) -> bool:
        return value_at(self.data, path, _ABSENT) is not _ABSENT


def value_at(data: Any, path: KeyPath, default: Any = None) -> Any:
    """Return the item at `path` of nested dicts and lists, or `default`."""
    for key in path:
        in_list = isinstance(data, list) and isinstance(key, int) and key < len(data)
        if not in_list and not (isinstance(data, dict) and key in data):
            return default
        data = data[key]
    return data


def set_at(data: dict[Any, Any], path: KeyPath, value: Any) -> None:
    """Set a nested key. Missing tables are created, and a table is merged into an existing one.

    Raises:
        NoSuchItem: an index in `path` is beyond the end of its list.
    """
    for at, key in enumerate(path[:-1]):
        child = data.get(key)
        if isinstance(child, list) and isinstance(path[at + 1], int):
            data[key] = merged(child, _nested(path[at + 1 :], value), path[: at + 1])
            return
        data[key] = child if isinstance(child, dict) else {}
        data = data[key]
    data[path[-1]] = merged(data.get(path[-1]), value)


def _nested(path: KeyPath, value: Any) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def merged(weak: Any, strong: Any, path: KeyPath = ()) -> Any:
    """Merge `strong` over `weak`: tables key by key at every depth. Anything else, also a list, is replaced.

    A table with indices as its keys changes items of a list, and may append to it.

    Raises:
        NoSuchItem: an index is beyond the end of the list. `path` is where the values are.
    """
    if isinstance(weak, list) and has_indices(strong):
        return _with_items(weak, strong, path)
    if not (isinstance(weak, dict) and isinstance(strong, dict)):
        return strong
    return weak | {key: merged(weak.get(key), value, (*path, key)) for key, value in strong.items()}


def has_indices(value: Any) -> bool:
    """Whether a value is a table of items of a list, by index."""
    return isinstance(value, dict) and bool(value) and all(isinstance(key, int) for key in value)


def _with_items(weak: list[Any], strong: Mapping[int, Any], path: KeyPath) -> list[Any]:
    items = [item.model_dump(exclude_unset=True) if isinstance(item, BaseModel) else item for item in weak]
    for index in sorted(strong):
        if index > len(items):
            raise NoSuchItem((*path, index), len(items))
        items[index : index + 1] = [merged((items[index:] or [{}])[0], strong[index], (*path, index))]
    return items


def merge_layers(root: Section, layers: Iterable[Layer]) -> dict[str, Any]:
    """Merge the layers of a config into one table. Later layers win.

    When a layer changes the `type` of a union, the keys that only the previous type has are dropped, with a
    `ConfigWarning`. Keys that both types have are kept.

    Raises:
        ConfigError: a layer sets an item beyond the end of a list.
    """
    result: dict[str, Any] = {}
    below: list[Layer] = []
    for layer in layers:
        change = _TypeChange(layer, below)
        weak = _with_default_lists((root,), change.without_old_keys((root,), result, layer.data, ()), layer.data)
        try:
            result = merged(weak, layer.data)
        except NoSuchItem as error:
            raise ConfigError([f"{layer.origin_below(error.path)}: {error}"]) from None
        below.append(layer)
    return result


def _with_default_lists(owners: tuple[Section, ...], weak: Any, strong: Any) -> Any:
    """Return `weak`, a table of one of `owners`, with the default of each list that `strong` changes items of."""
    if not (isinstance(strong, dict) and owners) or isinstance(weak, list):
        return weak
    table = dict(weak) if isinstance(weak, dict) else {}
    for name, value in strong.items():
        found = next((match[1] for owner in owners if (match := find_field(owner, str(name)))), None)
        if found is not None and has_indices(value) and not isinstance(table.get(name), list):
            default = found.get_default(call_default_factory=True)
            table[name] = [_as_table(item) for item in default] if isinstance(default, list) else []
        elif isinstance(value, dict) and (name in table or _changes_items(value)):
            table[name] = _with_default_lists(sections_below(owners, str(name)), table.get(name), value)
    return table


def _as_table(item: BaseModel) -> dict[str, Any]:
    """The raw data of an item of a default list. Without defaults, so that its `type` can be changed."""
    tag = tag_of(type(item))
    return item.model_dump(exclude_defaults=True) | ({"type": tag} if isinstance(tag, str) else {})


def _changes_items(value: Any) -> bool:
    return has_indices(value) or (isinstance(value, dict) and any(_changes_items(item) for item in value.values()))


@dataclass(frozen=True, slots=True)
class _TypeChange:
    """Drops keys of weaker layers that do not belong to the union types of a stronger one."""

    layer: Layer
    below: Sequence[Layer]

    def without_old_keys(self, owners: tuple[Section, ...], weak: Any, strong: Any, path: KeyPath) -> Any:
        """Return `weak`, the table at `path` of one of `owners`, without the keys that `strong` makes meaningless."""
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
    """Spell the keys of `root` in a layer with underscores. Keys that the user chooses, as in `args`, are kept.

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
    if has_indices(value):
        return {at: _with_underscores(owners, item, (*path, str(at)), faults) for at, item in value.items()}
    table: dict[str, Any] = {}
    for key, item in value.items():
        ours = key.replace("-", "_")
        known = any(match and match[0] == ours for match in (find_field(owner, ours) for owner in owners))
        name = ours if known else key
        if name in table:
            faults.append(
                f"{'.'.join((*path, name))}: is written twice, with dashes and with underscores: remove one of them"
            )
        if (named := named_below(owners, name)) and isinstance(item, dict):
            table[name] = {
                own: _with_underscores(named, each, (*path, name, own), faults) for own, each in item.items()
            }
            continue
        table[name] = _with_underscores(sections_below(owners, name), item, (*path, name), faults)
    return table
