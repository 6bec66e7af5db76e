"""TOML files: the `@` syntax, and files that stand on other files."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from prime_rl.utils.pydantic_config.errors import ConfigError
from prime_rl.utils.pydantic_config.layers import Layer, set_at
from prime_rl.utils.pydantic_config.schema import Section, is_boolean_flag

_TOML_PLACE = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$")
BASES_KEY = "toml_files"


class SectionPath(type(Path())):  # type: ignore[misc]
    """The path of a file whose content is one section of a config (`--trainer @ file`)."""

    section: tuple[str, ...] = ()


def in_section(path: Path, section: Sequence[str]) -> Path:
    result = SectionPath(path)
    result.section = tuple(section)
    return result


def section_of(path: Path) -> tuple[str, ...]:
    return getattr(path, "section", ())


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a file.

    Raises:
        ConfigError: it is missing, unreadable or not TOML; the fault names line and column.
    """
    try:
        return parse_toml(path, path.read_bytes().decode())
    except FileNotFoundError:
        fault = "no such file"
    except IsADirectoryError:
        fault = "a directory, not a TOML file"
    except UnicodeDecodeError as error:
        fault = f"not UTF-8 text (byte {error.start})"
    except OSError as error:
        fault = f"cannot be read ({os.strerror(error.errno or 0)})"
    raise ConfigError([f"{path}: {fault}"])


def parse_toml(path: Path, text: str) -> dict[str, Any]:
    """The content of a file whose text was read.

    Raises:
        ConfigError: it is not TOML; the fault names line and column.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = _TOML_PLACE.search(str(error))
        lines = text.splitlines() or [""]
        line, column = place.groups() if place and place[1] else (len(lines), len(lines[-1]) + 1)
        raise ConfigError([f"{path}:{line}:{column}: not TOML: {_TOML_PLACE.sub('', str(error))}"]) from error
    except RecursionError:
        raise ConfigError([f"{path}: tables or lists are nested too deeply"]) from None


@dataclass
class FileStack:
    """Files in the order of their strength, the bases of a file before it; no file is there twice."""

    files: list[Path] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def push(self, path: Path, section: tuple[str, ...] = ()) -> bool | None:
        """Add a file and the files that it stands on. True if there are any, None if the file was there already."""
        if any(path.resolve() == seen.resolve() and section == section_of(seen) for seen in self.files):
            return None
        mark = in_section(path, section) if section else path
        self.files.append(mark)
        try:
            table = read_toml(path)
            bases = _bases(path, table)
        except ConfigError as error:
            self.faults += error.faults
            return False
        for base in bases:
            self.push(base, section)
        # The file itself comes after its bases; it was noted before them so that a loop ends.
        self.files.remove(mark)
        self.files.append(mark)
        data: dict[str, Any] = table
        if section:
            data = {}
            set_at(data, section, table)
        self.layers.append(Layer(str(path), data))
        return bool(bases)

    def checked(self) -> FileStack:
        if self.faults:
            raise ConfigError(self.faults)
        return self


def _bases(path: Path, table: dict[str, Any]) -> list[Path]:
    """The files that `table` names as its bases; the key is taken out of it."""
    for key, value in table.items():
        if isinstance(value, dict) and BASES_KEY in value:
            raise ConfigError([f"{path}: {key}.{BASES_KEY}: read at the top of a file only; write it there"])
    names = table.pop(BASES_KEY, None)
    if names in (None, "None"):
        return []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError([f"{path}: {BASES_KEY}: should be a list of file names (got {names!r})"])
    return [path.parent / name for name in names]


def read_files(paths: Iterable[Path]) -> FileStack:
    """Read files and what they stand on, the last one strongest.

    Raises:
        ConfigError: one fault for each file that cannot be read.
    """
    stack = FileStack()
    for path in paths:
        stack.push(Path(path), section_of(path))
    return stack.checked()


def split_files(args: Sequence[str], is_flag: Callable[[str], bool]) -> tuple[list[Path], list[str]]:
    """Take `@ file`, `@file` and `--section @ file` out of arguments.

    A boolean flag right before an `@` stays where it is: `is_flag` tells, given `--name`. Raises ConfigError for an
    `@` without a file.
    """
    files: list[Path] = []
    remaining: list[str] = []
    before = ""
    words = iter(args)
    for word in words:
        if not word.startswith("@"):
            remaining.append(word)
            before = word
            continue
        name = word[1:] or next(words, "")
        if not name:
            raise ConfigError(["@: write a file after it, as in `@ config.toml`"])
        if before.startswith("--") and "=" not in before and not is_flag(before):
            remaining.pop()
            files.append(in_section(Path(name), before[2:].replace("-", "_").lower().split(".")))
        else:
            files.append(Path(name))
        before = ""
    return files, remaining


def extract_toml_paths(args: Sequence[str], config_cls: Section | None = None) -> tuple[list[Path], list[str]]:
    """The files that arguments name, each after the ones it stands on, and the other arguments.

    A section's file knows its section, so `set_toml_files` takes the paths as they are. With `config_cls`, a boolean
    flag before an `@` is not mistaken for a section.
    """
    paths, remaining = split_files(args, lambda flag: config_cls is not None and is_boolean_flag(config_cls, flag))
    return read_files(paths).files, remaining


def check_path_and_handle_inheritance(path: Path, seen_files: list[Path], nested_key: str | None = None) -> bool | None:
    """Append a file to `seen_files`, after the files it stands on. True if there are any, None if it was there."""
    stack = FileStack(files=seen_files)
    followed = stack.push(Path(path), tuple(nested_key.split(".")) if nested_key else ())
    stack.checked()
    return followed


def get_temp_toml_file() -> Path:
    """A fresh path for a TOML file in `.pydantic_config/`; whoever writes it deletes it."""
    directory = Path(".pydantic_config")
    directory.mkdir(exist_ok=True)
    return directory / f"{uuid4().hex}.toml"
