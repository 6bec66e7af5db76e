"""Writes the hint for a key of another version."""

from __future__ import annotations

from prime_rl.configs.surface.renamed import find_renamed, split_component
from prime_rl.utils.pydantic_config.schema import Section, has_key


def hint_for_renamed(root: Section, component: str, key: str, as_flag: bool = False) -> str | None:
    """What to write instead of `key`, which is dotted and belongs to `root`, the config of `component`.

    None if no other version has the key. With `as_flag`, keys look like options.
    """
    owner, rest = split_component(component, key)
    found = find_renamed(owner, rest)
    if found is None:
        return None
    entry, below = found
    if not entry.new:
        return entry.note
    prefix = key[: len(key) - len(rest)]
    places = [_place(root, component, owner, prefix, new.replace("*", owner, 1)) for new in entry.new]
    if not all(where or has_key(root, table.split(".")) for table, where in places):
        return None
    tables = [_shown(table, where, as_flag) for table, where in places]
    if entry.value == "same" and below:
        if not all(where or has_key(root, f"{table}.{below}".split(".")) for table, where in places):
            return f"{key.removesuffix(f'.{below}')} is {_joined(tables)} here, which has no {below}"
        tables = [_shown(f"{table}.{below}", where, as_flag) for table, where in places]
    return f"use {_joined(tables)}" + (f" ({entry.note})" if entry.note else "")


def _place(root: Section, component: str, owner: str, prefix: str, new: str) -> tuple[str, str]:
    """Return `new`, which starts with its component, as a key of `root`; and where it is if `root` does not have it."""
    target, _, key = new.partition(".")
    if target == owner:
        return prefix + key, ""
    if target == component:
        return key, ""
    return (new, "") if target in root.model_fields else (key, f" in the config of {target}")


def _shown(key: str, where: str, as_flag: bool) -> str:
    return (f"--{key.replace('_', '-')}" if as_flag else key) + where


def _joined(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"
