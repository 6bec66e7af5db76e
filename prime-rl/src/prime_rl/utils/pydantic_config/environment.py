"""Environment variables: `PRIME_RL_MAX_STEPS`, `PRIME_RL_MODEL__NAME`, and the same after `PRIME_`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prime_rl.utils.pydantic_config.errors import ConfigError
from prime_rl.utils.pydantic_config.layers import KeyPath, Layer, set_at
from prime_rl.utils.pydantic_config.schema import Section, find_key
from prime_rl.utils.pydantic_config.values import BadText, parse_text

PREFIXES = ("PRIME_", "PRIME_RL_")
"""From weak to strong."""


def environment_layer(root: Section, environ: Mapping[str, str]) -> Layer:
    """The keys of `root` that the environment sets. Variables that name no key at its top are somebody else's.

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
    """Variable and path, weak prefixes first, and the JSON of a section before its single keys."""
    found = []
    for strength, prefix in enumerate(PREFIXES):
        for variable in environ:
            if not variable.upper().startswith(prefix):
                continue
            path = tuple(variable[len(prefix) :].lower().split("__"))
            if path[0] in root.model_fields and path[0] != "toml_files":
                found.append((strength, len(path), variable, path))
    return [(variable, path) for _, _, variable, path in sorted(found)]
