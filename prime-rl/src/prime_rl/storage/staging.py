"""Replaces names on S3 in a config by the paths of local copies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from prime_rl.configs.storage import BadS3Name, S3Name
from prime_rl.storage.cache import Listing, cache_root, local_copy
from prime_rl.storage.s3 import S3
from prime_rl.utils.errors import StagingRefused, StorageError

WRITTEN_KEYS = frozenset({"output_dir", "upload_to", "work_dir", "toml_files"})
"""Keys that name no input."""

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, slots=True)
class Input:
    """Something on S3 that a config names."""

    key: str
    """The first key that names it."""
    listing: Listing

    def __str__(self) -> str:
        return f"{self.key} = {self.listing.name}: {self.listing}"


def has_s3_names(config: object) -> bool:
    """Whether a config names inputs on S3. Malformed names count."""
    try:
        return next(s3_names(config), None) is not None
    except BadS3Name:
        return True


def s3_names(value: Any, key: str = "") -> Iterator[tuple[str, S3Name]]:
    """Each input on S3 in a config, with the dotted key that names it.

    Raises:
        BadS3Name: S3 has no such names.
    """
    for inner, item in _items(value, key):
        if isinstance(item, str | Path):
            try:
                name = S3Name.of(item)
            except BadS3Name as error:
                raise BadS3Name(f"{inner}: {error}") from error
            if name is not None:
                yield inner, name
        else:
            yield from s3_names(item, inner)


def inputs_of(config: object, s3: S3 | None = None) -> list[Input]:
    """List every input on S3 that a config names.

    Raises:
        StagingRefused: one is missing or cannot be read, or boto3 is not installed.
    """
    try:
        names: dict[S3Name, str] = {}
        for key, name in s3_names(config):
            names.setdefault(name, key)
        s3 = s3 or S3.connect()
    except (BadS3Name, StorageError) as error:
        raise StagingRefused(str(error), known_here=isinstance(error, BadS3Name)) from error
    found, faults = [], {}
    for name, key in names.items():
        try:
            found.append(Input(key, Listing.of(s3, name)))
        except StorageError as error:
            faults[f"{key}: {error}"] = error.code in ("Nothing", "NoSuchBucket")
    if faults:
        raise StagingRefused(*faults, known_here=any(faults.values()))
    return found


def staged(config: ConfigT, say: Callable[[str], None]) -> ConfigT:
    """The config with the paths of local copies in place of names on S3. Downloads what is missing.

    Raises:
        StagingRefused: something cannot be downloaded.
    """
    if not has_s3_names(config):
        return config
    try:
        s3 = S3.connect()
        found = inputs_of(config, s3)
        root = cache_root(os.environ)
        paths = {each.listing.name: local_copy(s3, each.listing, root, say) for each in found}
    except StorageError as error:
        raise StagingRefused(str(error)) from error
    for each in found:
        say(f"{each}, in {paths[each.listing.name]}")
    replaced: ConfigT = _replaced(config, paths)
    return replaced


def _items(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            if name not in WRITTEN_KEYS:
                yield f"{key}.{name}" if key else name, getattr(value, name)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield f"{key}.{name}", item
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield f"{key}[{index}]", item


def _replaced(value: Any, paths: dict[S3Name, Path]) -> Any:
    """A copy with replaced names; `value` itself if it has none."""
    if isinstance(value, str | Path):
        name = S3Name.of(value)
        return value if name is None else type(value)(str(paths[name]))
    if isinstance(value, list):
        items = [_replaced(item, paths) for item in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if not isinstance(value, BaseModel | dict):
        return value
    names = type(value).model_fields if isinstance(value, BaseModel) else value
    before = {
        name: getattr(value, name) if isinstance(value, BaseModel) else value[name]
        for name in names
        if name not in WRITTEN_KEYS
    }
    changed = {name: new for name, old in before.items() if (new := _replaced(old, paths)) is not old}
    if not changed:
        return value
    return value.model_copy(update=changed) if isinstance(value, BaseModel) else {**value, **changed}
