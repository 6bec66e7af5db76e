"""Where values come from: one nested table a source, merged from weak to strong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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


def merge_layers(layers: Iterable[Layer]) -> dict[str, Any]:
    """One table of all layers; later ones win."""
    result: dict[str, Any] = {}
    for layer in layers:
        result = merged(result, layer.data)
    return result
