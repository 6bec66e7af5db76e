"""Reads the sources of a root config: files, keyword arguments, environment variables and the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from prime_rl.utils.pydantic_config.arguments import arguments_layer
from prime_rl.utils.pydantic_config.environment import environment_layer
from prime_rl.utils.pydantic_config.layers import Layer, merge_layers, with_underscores
from prime_rl.utils.pydantic_config.schema import is_boolean_flag
from prime_rl.utils.pydantic_config.toml_files import read_files, split_files


class TableSource(PydanticBaseSettingsSource):
    """A settings source that returns one table."""

    def __init__(self, settings_cls: type[BaseSettings], table: Mapping[str, Any], name: str) -> None:
        super().__init__(settings_cls)
        self.table = dict(table)
        self.name = name

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self.table.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self.table


def files_source(settings_cls: type[BaseSettings], paths: Sequence[Path]) -> TableSource:
    """Merge files into one table. The last file is the strongest."""
    return TableSource(settings_cls, _merged(settings_cls, read_files(paths).layers), "files")


def merged_sources(
    settings_cls: type[BaseSettings], cli_args: bool | Sequence[str] | None, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Merge the sources of a class into one table. The command line, `cli_args`, is the strongest.

    True takes the arguments of the process.

    Raises:
        ConfigError: a file, variable or argument cannot be read. There is one fault for each.
    """
    args = sys.argv[1:] if cli_args is True else cli_args or ()
    paths, options = split_files(args, lambda flag: is_boolean_flag(settings_cls, flag))
    nothing = TableSource(settings_cls, {}, "nothing")
    sources = settings_cls.settings_customise_sources(
        settings_cls,
        init_settings=TableSource(settings_cls, values, "keyword arguments"),
        env_settings=TableSource(settings_cls, environment_layer(settings_cls, os.environ).data, "environment"),
        dotenv_settings=nothing,
        file_secret_settings=nothing,
    )
    weak = [Layer(getattr(source, "name", type(source).__name__), source()) for source in reversed(sources)]
    return _merged(settings_cls, [*weak, *read_files(paths).layers, arguments_layer(settings_cls, options)])


def _merged(settings_cls: type[BaseSettings], layers: Iterable[Layer]) -> dict[str, Any]:
    return merge_layers(settings_cls, [with_underscores(settings_cls, layer) for layer in layers])
