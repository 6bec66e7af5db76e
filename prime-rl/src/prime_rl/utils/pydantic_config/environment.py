"""Reads environment variables such as `PRIME_RL_MODEL__NAME`. The older prefix `PRIME_` works too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from prime_rl.utils.errors import ConfigError, ConfigWarning
from prime_rl.utils.pydantic_config.faults import nearest_keys
from prime_rl.utils.pydantic_config.layers import Layer, set_at
from prime_rl.utils.pydantic_config.schema import Section, find_key
from prime_rl.utils.pydantic_config.values import BadText, parse_text
from prime_rl.utils.scratch import LAUNCH_VARIABLE
from prime_rl.utils.tables import KeyPath

PREFIXES = ("PRIME_", "PRIME_RL_")
"""The last prefix wins."""
NOT_KEYS = frozenset(
    {
        LAUNCH_VARIABLE,
        "PRIME_RL_BUCKET_CACHE",
        "PRIME_RL_CACHE",
        "PRIME_RL_METRICS_KEY",
        "PRIME_RL_PROXY_API_KEY",
        "PRIME_RL_RUNTIME_DIR",
        "PRIME_RL_STORE",
        "PRIME_RL_TRANSPORT_KEY",
        "PRIME_RL_UPDATE_COUNT",
        "PRIME_RL_VENVS",
        "PRIME_RL_VLLM_PYTHON",
    }
)
"""Variables with the prefix that are no keys of a config."""


def environment_layer(root: Section, environ: Mapping[str, str]) -> Layer:
    """Return the keys of `root` that the environment sets.

    A variable whose first word is not a key at the top of `root` is ignored, since it may belong to another program. If
    it starts with `PRIME_RL_`, there is a `ConfigWarning`.

    Raises:
        ConfigError: the JSON of a section is malformed.
    """
    data: dict[str, Any] = {}
    origins: dict[KeyPath, str] = {}
    faults = []
    for text in _ignored(root, environ):
        warnings.warn(text, ConfigWarning, stacklevel=2)
    for variable, words in _variables(root, environ):
        site = find_key(root, ".".join(words))
        path: KeyPath = site.path if site else words
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
            path = _path(variable, prefix)
            if path is not None and _is_ours(root, path):
                found.append((strength, len(path), variable, path))
    return [(variable, path) for _, _, variable, path in sorted(found)]


def _ignored(root: Section, environ: Mapping[str, str]) -> Iterator[str]:
    """One line for each variable that is meant for us and is no key of `root`."""
    # The launcher has read the environment for all of its processes.
    if LAUNCH_VARIABLE in environ:
        return
    for variable in sorted(environ):
        path = _path(variable, PREFIXES[-1])
        if path is None or _is_ours(root, path) or variable.upper() in NOT_KEYS:
            continue
        nearest = [PREFIXES[-1] + "__".join(key).upper() for key in nearest_keys(root, path)]
        hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
        command = getattr(root, "component", "") or "this command"
        yield f"{variable} is ignored: {command} has no key {'.'.join(path)}{hint}"


def _path(variable: str, prefix: str) -> tuple[str, ...] | None:
    if not variable.upper().startswith(prefix):
        return None
    return tuple(variable[len(prefix) :].lower().split("__"))


def _is_ours(root: Section, path: tuple[str, ...]) -> bool:
    return path[0] in root.model_fields and path[0] != "toml_files"
