"""Walks nested tables, such as those of a TOML file or a dumped config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

KeyPath = tuple[str | int, ...]
"""Keys from the outermost table to a value; an item of a list of tables is named by its index."""


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield path and value of everything that is neither a table nor a list of tables.

    `{"a": {"b": 1}, "c": [{"d": 2}]}` has the leaves `("a", "b"), 1` and `("c", 0, "d"), 2`. An empty table or list
    below the top is a leaf.
    """
    items: Iterable[tuple[str | int, Any]] | None = None
    if isinstance(value, Mapping) and (value or not path):
        items = value.items()
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        items = enumerate(value)
    if items is None:
        yield path, value
        return
    for key, item in items:
        yield from leaves(item, (*path, key))


def dotted(path: KeyPath) -> str:
    """The path as users write it: `model.lora.rank`."""
    return ".".join(map(str, path))
