"""Reads environment variables such as `PRIME_RL_MODEL__NAME`. The older prefix `PRIME_` works too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prime_rl.utils.pydantic_config.errors import ConfigError
from prime_rl.utils.pydantic_config.layers import KeyPath, Layer, set_at
from prime_rl.utils.pydantic_config.schema import Section, find_key
from prime_rl.utils.pydantic_config.values import BadText, parse_text

PREFIXES = ("PRIME_", "PRIME_RL_")
"""The last prefix wins."""


def environment_layer(root: Section, environ: Mapping[str, str]) -> Layer:
    """Return the keys of `root` that the environment sets.

    A variable whose first word is not a key at the top of `root` is ignored: it may belong to another program.

    Raises:
        ConfigError: the JSON of a section is malformed.
    """
    data: dict[str, Any] = {}
    origins: dict[KeyPath, str] = {}
    faults = []
    for variable, path in _variables(root, environ):
        site = find_key(root, ".".join(path))
        try:
            value = parse_text(environ[variable], site.kinds) if site else environ[variable]
        except BadText as error:
            faults.append(f"{variable}: {error}")
            continue
        set_at(data, path, value)
        origins[path] = variable
    if faults:
        raise ConfigError(faults)
    return Layer("environment", data, origins)


def _variables(root: Section, environ: Mapping[str, str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return variables and their paths, the weak prefix first, and the JSON of a section before its keys."""
    found = []
    for strength, prefix in enumerate(PREFIXES):
        for variable in environ:
            if not variable.upper().startswith(prefix):
                continue
            path = tuple(variable[len(prefix) :].lower().split("__"))
            if path[0] in root.model_fields and path[0] != "toml_files":
                found.append((strength, len(path), variable, path))
    return [(variable, path) for _, _, variable, path in sorted(found)]
