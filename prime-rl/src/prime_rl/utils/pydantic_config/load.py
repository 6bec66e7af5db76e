"""Loads a config from files, environment variables and arguments, and reports each mistake in one line."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from prime_rl.utils.errors import ConfigError, ConfigWarning
from prime_rl.utils.private import set_home
from prime_rl.utils.pydantic_config.arguments import arguments_layer, environment_layer, parse_arguments
from prime_rl.utils.pydantic_config.base import BaseSettings
from prime_rl.utils.pydantic_config.faults import faults_of
from prime_rl.utils.pydantic_config.layers import Layer, merge_layers, with_underscores
from prime_rl.utils.pydantic_config.schema import is_boolean_flag
from prime_rl.utils.pydantic_config.toml_files import read_files, split_files

ConfigT = TypeVar("ConfigT", bound=BaseSettings)
_unknown_args: ContextVar[list[str]] = ContextVar("unknown_args")


def load_config(
    config_cls: type[ConfigT], files: Sequence[Path | str] = (), overrides: Sequence[str] | Mapping[str, Any] = ()
) -> ConfigT:
    """Load a config from files and overrides.

    Overrides are arguments (which may name more files with `@`) or a nested dict. From weak to strong: environment
    variables, files in the given order, overrides. Reads and changes no class or module state.

    Raises:
        ConfigError: the config has faults, one line each.
    """
    paths = [path if isinstance(path, Path) else Path(path) for path in files]
    if isinstance(overrides, Mapping):
        return ConfigSources.read(config_cls, paths, Layer("override", dict(overrides))).build()
    more_paths, args = split_files(overrides, lambda flag: is_boolean_flag(config_cls, flag))
    return ConfigSources.read(config_cls, [*paths, *more_paths], arguments_layer(config_cls, args)).build()


def parse_argv(config_cls: type[ConfigT], allow_extras: bool = False, argv: Sequence[str] | None = None) -> ConfigT:
    """Load the config of a command from `argv`, by default the process's arguments. `--help` prints every option.

    With `allow_extras`, unknown options are kept for `get_unknown_args`.

    Raises:
        ConfigError: the config has faults, one line each.
        SystemExit: 0, after `--help`.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        from prime_rl.utils.pydantic_config.describe import help_text

        sys.stdout.write(help_text(config_cls, allow_extras))
        raise SystemExit(0)
    paths, args = split_files(argv, lambda flag: is_boolean_flag(config_cls, flag))
    parsed = parse_arguments(config_cls, args, allow_extras).checked()
    set_unknown_args(parsed.extras)
    return ConfigSources.read(config_cls, paths, parsed.layer()).build()


def parse_argv_or_exit(
    config_cls: type[ConfigT], allow_extras: bool = False, argv: Sequence[str] | None = None
) -> ConfigT:
    """Like `parse_argv`, but print each fault as an `error:` line on stderr and exit with status 2.

    Every program of the engine begins with it, so that it also gives a process its HOME.
    """
    set_home()
    try:
        with showing_warnings():
            return parse_argv(config_cls, allow_extras, argv)
    except ConfigError as error:
        sys.stderr.writelines(f"error: {fault}\n" for fault in error.faults)
        raise SystemExit(2) from None


@contextmanager
def showing_warnings() -> Iterator[None]:
    """Print each distinct config warning raised in the block as one `warning:` line on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        try:
            yield
        finally:
            lines = dict.fromkeys(" ".join(str(item.message).split()) for item in caught)
            sys.stderr.writelines(f"warning: {line}\n" for line in lines)


def set_unknown_args(args: Sequence[str]) -> None:
    """Store the arguments that `parse_argv` did not recognise."""
    _unknown_args.set(list(args))


def get_unknown_args() -> list[str]:
    """Return the arguments that the last `parse_argv(..., allow_extras=True)` did not recognise.

    Raises:
        AttributeError: nothing has been parsed yet.
    """
    try:
        return _unknown_args.get()
    except LookupError:
        raise AttributeError("no arguments were parsed yet") from None


@dataclass(frozen=True, slots=True)
class ConfigSources(Generic[ConfigT]):
    """What was given for a config, read once: environment variables, files and options, each with its origins."""

    root: type[ConfigT]
    layers: tuple[Layer, ...]
    """From weak to strong."""

    @classmethod
    def read(
        cls,
        root: type[ConfigT],
        files: Sequence[Path],
        overrides: Layer = Layer("command line", {}),  # noqa: B008 - frozen
        texts: dict[str, str] | None = None,
    ) -> ConfigSources[ConfigT]:
        """Read the environment and the files. `overrides` are the strongest. `texts`: see `read_files`.

        Raises:
            ConfigError: a source cannot be read.
        """
        given = [environment_layer(root, os.environ), *read_files(files, texts).layers, overrides]
        return cls(root, tuple(with_underscores(root, layer) for layer in given))

    def over(self, layer: Layer) -> ConfigSources[ConfigT]:
        """The sources with one more, which is the strongest."""
        return replace(self, layers=(*self.layers, layer))

    def table(self) -> dict[str, Any]:
        """Merge the sources. Raises ConfigError: one sets an item beyond the end of a list."""
        return merge_layers(self.root, self.layers)

    def build(self) -> ConfigT:
        """Merge the sources and validate the result.

        Raises:
            ConfigError: the config has faults, one line each.
        """
        try:
            return self.root.model_validate(self.table())
        except ValidationError as error:
            raise ConfigError(self._faults_of_files() or faults_of(self.root, error, self.layers)) from None

    def _faults_of_files(self) -> list[str]:
        """One line for each file that is a config of another command."""
        hook: Callable[[str, dict[str, Any]], str | None] = getattr(self.root, "fault_of_file", lambda *_: None)
        return [fault for layer in self.layers if layer.is_file and (fault := hook(layer.name, layer.data))]
