"""The two base classes of all configs: they read the sources of a root config, prepare raw data, and write TOML."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, ClassVar

import pydantic_settings
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import PydanticBaseSettingsSource, SettingsConfigDict

from prime_rl.utils.files import replacing_file
from prime_rl.utils.pydantic_config.arguments import arguments_layer, environment_layer
from prime_rl.utils.pydantic_config.layers import Layer, merge_layers, with_underscores
from prime_rl.utils.pydantic_config.schema import is_boolean_flag, tag_of, union_fields
from prime_rl.utils.pydantic_config.toml_files import read_files, split_files

NULL_TEXT = "None"
"""Stands for None anywhere in a config, because TOML has no null."""


def with_nulls(value: Any) -> Any:
    """Copy raw data, replacing every `"None"` by None."""
    if isinstance(value, dict):
        return {key: with_nulls(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_nulls(item) for item in value]
    return None if isinstance(value, str) and value == NULL_TEXT else value


def prepare_table(cls: type[BaseModel], data: dict[str, Any]) -> dict[str, Any]:
    """Return the raw data of one section with nulls, and with the default `type` in each union that names none.

    For example, `[optim]` with only `lr` gets the type of the default optimizer. `data` is not changed.
    """
    table = {key: with_nulls(value) for key, value in data.items()}
    for name, default_type in union_fields(cls).items():
        value = table.get(name)
        if isinstance(value, dict) and "type" not in value:
            table[name] = {"type": default_type, **value}
    return table


def explicit_values(model: BaseModel) -> dict[str, Any]:
    """Return the raw data of `model`, without defaults."""
    values: dict[str, Any] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        inner = explicit_values(value) if isinstance(value, BaseModel) else value
        if name in model.model_fields_set or (isinstance(value, BaseModel) and inner):
            values[name] = inner
    # A variant of a union is known by its `type`, which nobody needs to give when the class is named.
    if values and isinstance(tag_of(type(model)), str):
        values["type"] = model.type  # type: ignore[attr-defined]
    return values


def raise_faults(faults: Iterable[str]) -> None:
    """Raise one ValueError with a line for each fault. Do nothing without faults."""
    if lines := list(faults):
        raise ValueError("\n".join(lines))


@dataclass(frozen=True, slots=True)
class Derivation:
    """A value that a rule has set."""

    key: str
    """Name of the field of `model`, or a dotted key of the root if `model` is None."""
    because: str
    """The rule, as a clause: `warmup_ratio is not set`."""
    model: BaseModel | None = None


_derivations: ContextVar[list[Derivation] | None] = ContextVar("derivations", default=None)


@contextmanager
def recorded_derivations() -> Iterator[list[Derivation]]:
    """Collect what rules set while configs are built in the block, in order."""
    found: list[Derivation] = []
    token = _derivations.set(found)
    try:
        yield found
    finally:
        _derivations.reset(token)


def note_derivation(derivation: Derivation) -> None:
    if (found := _derivations.get()) is not None:
        found.append(derivation)


def derive(model: BaseModel, because: str, /, **values: Any) -> None:
    """Set values that follow from other values, without marking them as set by the user.

    Call it only in validators: it bypasses `frozen` while a config is being built. `because` is shown to the user.
    """
    for name, value in values.items():
        if getattr(model, name, None) != value:
            note_derivation(Derivation(name, because, model))
    model.__dict__.update(values)


def _without_hash(model: BaseModel) -> int:
    """Make configs unhashable.

    Pydantic gives frozen models a hash, and does not copy a default that is hashable. `derive` on one instance would
    then change the default of all others.
    """
    raise TypeError(f"{type(model).__name__} is not hashable: it holds lists and tables")


class BaseConfig(BaseModel):
    """A section of a config. Unknown keys, NaN and infinity are errors, and `"None"` is None.

    Attributes cannot be assigned. Lists and dicts in a config are plain Python objects: do not change them. A section
    given as an instance is copied.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, revalidate_instances="always", defer_build=True, allow_inf_nan=False
    )

    __hash__ = _without_hash

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, data: Any) -> Any:
        return cls.prepare(data) if isinstance(data, dict) else data

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return the raw data to validate instead of `data`, which is not changed."""
        return prepare_table(cls, data)


class TableSource(PydanticBaseSettingsSource):
    """A settings source that returns one table."""

    def __init__(self, settings_cls: type[pydantic_settings.BaseSettings], table: Mapping[str, Any], name: str) -> None:
        super().__init__(settings_cls)
        self.table = dict(table)
        self.name = name

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self.table.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self.table


def files_source(settings_cls: type[pydantic_settings.BaseSettings], paths: Sequence[Path]) -> TableSource:
    """Merge files into one table. The last file is the strongest."""
    return TableSource(settings_cls, _merged(settings_cls, read_files(paths).layers), "files")


def merged_sources(
    settings_cls: type[pydantic_settings.BaseSettings], cli_args: bool | Sequence[str] | None, values: Mapping[str, Any]
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


def _merged(settings_cls: type[pydantic_settings.BaseSettings], layers: Iterable[Layer]) -> dict[str, Any]:
    return merge_layers(settings_cls, [with_underscores(settings_cls, layer) for layer in layers])


class BaseSettings(pydantic_settings.BaseSettings):
    """The root of a config, which also reads files, environment variables and command-line arguments.

    Frozen, like its sections.

    Constructing one reads, from weak to strong: defaults, environment variables, keyword arguments, the files of
    `set_toml_files`, `_cli_parse_args`. A nested instance (the `trainer` of an `RLConfig`) reads none of them.
    """

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        revalidate_instances="always",
        defer_build=True,
        allow_inf_nan=False,
        env_prefix="PRIME_RL_",
        env_nested_delimiter="__",
        cli_kebab_case=True,
        cli_implicit_flags=True,
    )
    component: ClassVar[str] = ""
    """Name of this config in other configs, and in messages about its keys."""

    shortcuts: ClassVar[Mapping[str, str]] = {}
    """Options with a name of their own: the dotted key that each sets."""

    files_to_read: ClassVar[tuple[Path, ...]] = ()

    toml_files: list[str] | None = Field(None, exclude=True)
    """TOML files to inherit from, relative to this file; its own keys are stronger. Read only at the top of a file."""

    def __init__(self, _cli_parse_args: bool | Sequence[str] | None = None, **values: Any) -> None:
        super(pydantic_settings.BaseSettings, self).__init__(**merged_sources(type(self), _cli_parse_args, values))

    # Pydantic then validates nested instances without calling __init__, so only the outermost one reads sources.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    __hash__ = _without_hash

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, data: Any) -> Any:
        return cls.prepare(data) if isinstance(data, dict) else data

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return the raw data to validate instead of `data`, which is not changed."""
        return prepare_table(cls, data)

    @classmethod
    def set_toml_files(cls, paths: Sequence[Path | str]) -> None:
        """Read these files in every new instance, until `clear_toml_files`. The last file is the strongest."""
        cls.files_to_read = tuple(path if isinstance(path, Path) else Path(path) for path in paths)

    @classmethod
    def clear_toml_files(cls) -> None:
        cls.files_to_read = ()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[pydantic_settings.BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return files, keyword arguments and environment, strongest first. The command line is stronger than all."""
        return files_source(cls, cls.files_to_read), init_settings, env_settings, dotenv_settings, file_secret_settings

    @classmethod
    def advice_for_key(cls, key: str, as_flag: bool = False) -> str | None:
        """Return what to write instead of a key of another version, or None for any other key."""
        return None


# A config as a TOML file that loads to an equal config.


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
