"""Finds which job a config is for."""

from __future__ import annotations

from pathlib import Path

from medarc_rl.errors import UsageError
from prime_rl.utils.pydantic_config import ConfigError
from prime_rl.utils.pydantic_config.toml_files import read_files

KINDS = ("sft", "rl")


def job_kind(words: list[str]) -> tuple[str, list[str]]:
    """The kind of job that a command line is about, and its words without the kind.

    The first word may name it; otherwise the keys of the files do.

    Raises:
        UsageError: no file is named, or it is for another command, or it fits both kinds.
    """
    if words[:1] and words[0] in KINDS:
        return words[0], words[1:]
    files = [Path(word.removeprefix("@")) for word in words if word.endswith(".toml") and not word.startswith("-")]
    if not files:
        raise UsageError("no config: name a TOML file, as in `check config.toml` or `check rl @ config.toml`")
    try:
        layers = read_files(files).layers
    except ConfigError as error:
        raise UsageError(*error.faults) from error
    from medarc_rl.migrate.draft import names
    from prime_rl.configs.surface.kinds import unknown_counts
    from prime_rl.utils.tables import leaves

    keys = {".".join(names(path)) for layer in layers for path, _ in leaves(layer.data)}
    unknown = unknown_counts(keys)
    fewest = min(unknown.values())
    fitting = [kind for kind in KINDS if unknown[kind] == fewest]
    if not fitting:
        others = " or ".join(kind for kind, count in unknown.items() if count == fewest)
        raise UsageError(f"{files[-1]}: a config of {others}; jobs are submitted for {' and '.join(KINDS)}")
    if len(fitting) > 1:
        raise UsageError(f"{files[-1]}: fits both kinds of jobs: write `check sft` or `check rl` before it")
    return fitting[0], words
