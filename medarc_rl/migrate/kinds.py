"""Finds which command and which version of PRIME-RL a file is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from medarc_rl.errors import UsageError
from medarc_rl.migrate.draft import names
from prime_rl.configs.surface.kinds import ROOTS, unknown_counts
from prime_rl.configs.surface.meanings import NEWER_VALUES, Version
from prime_rl.configs.surface.renamed import NEWER, OLDER, find_renamed, split_component
from prime_rl.utils.pydantic_config.layers import Layer
from prime_rl.utils.pydantic_config.schema import has_key
from prime_rl.utils.tables import KeyPath, leaves

IN_EVERY_VERSION = ("clean",)
"""Keys that both older and newer versions have, so that they do not tell the version."""


def kind_of(settings: Mapping[KeyPath, Any]) -> str:
    """The command whose config knows the most of these keys.

    Raises:
        UsageError: no command knows any of them, or several know equally many.
    """
    unknown = unknown_counts(".".join(names(path)) for path in settings)
    fewest = min(unknown.values())
    likely = [kind for kind, count in unknown.items() if count == fewest]
    if fewest == len(settings):
        raise UsageError("none of its keys belongs to a PRIME-RL command: name the command with --as")
    if len(likely) > 1:
        raise UsageError(f"its keys fit {' and '.join(likely)}: name the command with --as")
    return likely[0]


def versions_of(kind: str, settings: Mapping[KeyPath, Any]) -> set[Version]:
    """The versions whose keys or values the file uses; empty if this version has them all."""
    versions: set[Version] = set()
    for path, value in settings.items():
        component, key = split_component(kind, ".".join(names(path)))
        found = None if has_key(ROOTS[kind], names(path)) else find_renamed(component, key)
        if found is not None and path[-1] not in IN_EVERY_VERSION:
            versions |= {"older"} if found[0] in OLDER else {"newer"} if found[0] in NEWER else set()
        if any(each.applies(f"{component}.{key}", value, ()) for each in NEWER_VALUES):
            versions.add("newer")
    return versions


def suggested_migrations(kind: str, layers: Iterable[Layer]) -> Iterator[str]:
    """A line for each file of another version among the sources of a config that does not load."""
    for layer in layers:
        versions = versions_of(kind, dict(leaves(layer.data)))
        if versions and Path(layer.name).is_file():
            yield f"{layer.name} is for another version of PRIME-RL: `medarc_train migrate {layer.name}` rewrites it"
