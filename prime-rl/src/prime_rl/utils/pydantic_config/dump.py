"""Writes a config as a TOML file that loads to an equal config."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path, PurePath
from typing import Any

import tomli_w
from pydantic import BaseModel

from prime_rl.utils.files import replacing_file
from prime_rl.utils.pydantic_config.base import NULL_TEXT


def to_toml(config: BaseModel, exclude: Collection[str] = ()) -> str:
    """Return every value of `config` as TOML, except the root keys in `exclude`. None is written as `"None"`."""
    return tomli_w.dumps(_plain(config.model_dump(exclude=set(exclude))))


def dump_toml(config: BaseModel, path: Path, exclude: Collection[str] = ()) -> None:
    """Write `to_toml(config)` to `path` atomically."""
    with replacing_file(Path(path)) as scratch:
        scratch.write_text(to_toml(config, exclude), encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None:
        return NULL_TEXT
    return str(value) if isinstance(value, PurePath) else value
