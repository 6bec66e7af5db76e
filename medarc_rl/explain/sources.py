"""Reads what `explain` is asked about: the words of a command line, or the directory of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from medarc_rl.errors import UsageError
from medarc_rl.explain.origins import Explained, Setting, explained_config
from medarc_rl.explain.screen import as_json
from medarc_rl.migrate.draft import kind_of
from prime_rl.configs.surface.renamed import SFT_COMMANDS
from prime_rl.configs.surface.root import ROOTS
from prime_rl.run.paths import RunPaths
from prime_rl.utils.errors import one_line
from prime_rl.utils.files import replacing_file
from prime_rl.utils.pydantic_config import BaseSettings, showing_warnings
from prime_rl.utils.pydantic_config.arguments import parse_arguments
from prime_rl.utils.pydantic_config.faults import nearest_keys
from prime_rl.utils.pydantic_config.load import ConfigSources
from prime_rl.utils.pydantic_config.schema import is_boolean_flag
from prime_rl.utils.pydantic_config.toml_files import read_files, section_of, split_files
from prime_rl.utils.tables import leaves

# The origins of a run's values stay next to its configs, so that they can still be explained later.


NAME = "origins.json"


def record_origins(paths: RunPaths, values: Sequence[Explained]) -> None:
    """Write where each value that is not a default was set."""
    paths.configs.mkdir(parents=True, exist_ok=True)
    text = json.dumps(as_json([each for each in values if each.is_of_interest]), indent=1)
    with replacing_file(paths.configs / NAME) as scratch:
        scratch.write_text(text, encoding="utf-8")


def recorded_origins(paths: RunPaths, values: Sequence[Explained]) -> list[Explained]:
    """The values of a run with the origins that were recorded when it started.

    A run that was started by another command has no record: everything then comes from its resolved config.

    Raises:
        UsageError: the record is damaged.
    """
    file = paths.configs / NAME
    if not file.exists():
        return list(values)
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return [_with_origin(each, record.get(each.key)) for each in values]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read ({error}): delete it to see the values alone") from error


def _with_origin(value: Explained, entry: dict[str, object] | None) -> Explained:
    if entry is None:
        return replace(value, written=(), rule=None)
    lost = entry["overrides"]
    if not isinstance(lost, list):
        raise TypeError("overrides is no list")
    places = [one_line(str(each["origin"])) for each in (entry, *lost)]
    written = [Setting(*each) for each in zip((value.value, *(each["value"] for each in lost)), places, strict=True)]
    return replace(value, written=tuple(written), rule=None)


_KINDS = ("rl", *SFT_COMMANDS, "eval")


@dataclass(frozen=True, slots=True)
class Source:
    """A config whose values are explained."""

    name: str
    root: type[BaseSettings]
    values: Sequence[Explained]
    key: str | None = None
    """The key or section that was asked for."""

    @classmethod
    def of_words(cls, words: Sequence[str], kind: str | None) -> Source:
        """Raises UsageError, or ConfigError if the config has faults."""
        for index, word in enumerate(words):
            if not word.startswith("-") and Path(word).is_dir():
                rest = [*words[:index], *words[index + 1 :]]
                if len(rest) > 1 or any(each.startswith("-") for each in rest):
                    raise UsageError(
                        f"{word} is the directory of a run, whose config is fixed: give at most one KEY after it, and "
                        "no options"
                    )
                return cls.of_run(Path(word), rest[0] if rest else None)
        return cls.of_config(words, kind)

    @classmethod
    def of_path(cls, path: Path, kind: str | None) -> Source:
        """Raises UsageError, or ConfigError if the config has faults."""
        return cls.of_run(path) if path.is_dir() else cls.of_config(["@", str(path)], kind)

    @classmethod
    def of_config(cls, words: Sequence[str], kind: str | None) -> Source:
        """Raises UsageError, or ConfigError if the config has faults."""
        texts: dict[str, str] = {}
        root = ROOTS[kind or _kind_of(words, texts)]
        files, overrides = split_files(words, lambda flag: is_boolean_flag(root, flag))
        parsed = parse_arguments(root, overrides)
        plain = [parsed.take(word) for word in list(parsed.plain)]
        if not files and plain:
            files = [Path(plain.pop(0))]
        if len(plain) > 1:
            raise UsageError(f"give one KEY at a time (got {' and '.join(plain)})")
        with showing_warnings():
            _, values = explained_config(ConfigSources.read(root, files, parsed.checked().layer(), texts))
        key = plain[0].replace("-", "_") if plain else None
        return cls(" ".join(map(str, files)), root, values, key)

    @classmethod
    def of_run(cls, directory: Path, key: str | None = None) -> Source:
        """The config that a run was started with. Raises UsageError if the directory holds none."""
        paths = RunPaths(directory)
        for kind, component in (*((kind, kind) for kind in _KINDS), ("sft", "trainer")):
            if (file := paths.config(component)).is_file():
                root = ROOTS[kind]
                _, values = explained_config(ConfigSources.read(root, [file]))
                return cls(str(directory), root, recorded_origins(paths, values), key)
        raise UsageError(f"{directory} is not the directory of a run: it has no configs/rl.toml, sft.toml or eval.toml")

    def below_key(self, key: str | None = None) -> list[Explained]:
        """The key's value, or the values of a section. Raises UsageError if there is no such key."""
        key = key or self.key
        found = [each for each in self.values if key is None or f"{each.key}.".startswith(f"{key}.")]
        if not found:
            nearest = [".".join(path) for path in nearest_keys(self.root, tuple((key or "").split(".")))]
            hint = f": did you mean {' or '.join(nearest)}?" if nearest else ""
            raise UsageError(f"{self.name} has no key {key}{hint}")
        return found


def _kind_of(words: Sequence[str], texts: dict[str, str]) -> str:
    """The command that the files among some words are for. `texts` keeps what was read. Raises UsageError."""
    files, rest = split_files(words, lambda flag: False)
    files = files or [Path(word) for word in rest if word.endswith(".toml")][:1]
    if not files:
        raise UsageError("no config: name a TOML file or the directory of a run, as in `explain config.toml`")
    if any(section_of(file) for file in files):
        return "rl"
    settings = {path: value for layer in read_files(files, texts).layers for path, value in leaves(layer.data)}
    kind = kind_of(settings) if settings else "sft"
    if kind not in _KINDS:
        raise UsageError(
            f"{files[0]} is a config of {kind}: explain an rl, sft or eval config, as in `--{kind} @ file`"
        )
    return kind
