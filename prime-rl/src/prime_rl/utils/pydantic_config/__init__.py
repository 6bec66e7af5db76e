"""Strict configs from TOML files, environment variables and command-line arguments."""

from prime_rl.utils.errors import ConfigError, ConfigWarning
from prime_rl.utils.pydantic_config.arguments import parse_unknown_args, to_kebab_case
from prime_rl.utils.pydantic_config.base import (
    BaseConfig,
    BaseSettings,
    derive,
    dump_toml,
    explicit_values,
    raise_faults,
    to_toml,
)
from prime_rl.utils.pydantic_config.load import (
    get_unknown_args,
    load_config,
    parse_argv,
    parse_argv_or_exit,
    set_unknown_args,
    showing_warnings,
)
from prime_rl.utils.pydantic_config.schema import get_all_fields
from prime_rl.utils.pydantic_config.toml_files import (
    check_path_and_handle_inheritance,
    extract_toml_paths,
    get_temp_toml_file,
)

__all__ = [
    "BaseConfig",
    "BaseSettings",
    "ConfigError",
    "ConfigWarning",
    "check_path_and_handle_inheritance",
    "derive",
    "dump_toml",
    "explicit_values",
    "extract_toml_paths",
    "get_all_fields",
    "get_temp_toml_file",
    "get_unknown_args",
    "load_config",
    "parse_argv",
    "parse_argv_or_exit",
    "parse_unknown_args",
    "raise_faults",
    "set_unknown_args",
    "showing_warnings",
    "to_kebab_case",
    "to_toml",
]
