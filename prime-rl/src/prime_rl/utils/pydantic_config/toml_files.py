"""Reads TOML files: the `@` syntax, and `toml_files`, the list of base files."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from prime_rl.utils.errors import ConfigError
from prime_rl.utils.files import open_regular
from prime_rl.utils.pydantic_config.layers import Layer, set_at
from prime_rl.utils.pydantic_config.schema import Section, is_boolean_flag
from prime_rl.utils.pydantic_config.values import data_fault

_TOML_PLACE = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$")
BASES_KEY = "toml_files"
MAX_FILE_BYTES = 1 << 20
MAX_FILES = 1000
MAX_BASES_DEPTH = 50
"""Files that inherit from each other in one line."""


class SectionPath(type(Path())):  # type: ignore[misc]
    """Path of a file that holds one section of a config (`--trainer @ file`)."""

    section: tuple[str, ...] = ()


def in_section(path: Path, section: Sequence[str]) -> Path:
    result = SectionPath(path)
    result.section = tuple(section)
    return result


def section_of(path: Path) -> tuple[str, ...]:
    return getattr(path, "section", ())


def read_text(path: Path) -> str:
    """Read the text of a TOML file.

    Raises:
        ConfigError: the file is missing, unreadable, too large or not UTF-8.
    """
    try:
        with open_regular(path) as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) <= MAX_FILE_BYTES:
            # Editors on Windows begin a file with a byte order mark.
            return content.decode("utf-8-sig")
        fault = f"more than {MAX_FILE_BYTES >> 20} MiB, too large for a config"
    except FileNotFoundError:
        fault = "no such file"
    except IsADirectoryError:
        fault = "a directory, not a TOML file"
    except UnicodeDecodeError as error:
        fault = f"not UTF-8 text (byte {error.start})"
    except OSError as error:
        fault = f"cannot be read ({error.strerror or error})"
    raise ConfigError([f"{path}: {fault}"])


def parse_toml(path: Path, text: str) -> dict[str, Any]:
    """Parse the text of the file `path`.

    Raises:
        ConfigError: the text is not TOML, or a config cannot hold its values. The fault names line and column, or key.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = _TOML_PLACE.search(str(error))
        lines = text.splitlines() or [""]
        line, column = place.groups() if place and place[1] else (len(lines), len(lines[-1]) + 1)
        if path.suffix.lower() in (".yaml", ".yml", ".json"):
            kind = "JSON" if path.suffix.lower() == ".json" else "YAML"
            advice = "configs are TOML: write `a: 1` as `a = 1`, and a table as `[table]`"
            raise ConfigError([f"{path}: a {kind} file; {advice}"]) from error
        raise ConfigError([f"{path}:{line}:{column}: not TOML: {_TOML_PLACE.sub('', str(error))}"]) from error
    except RecursionError:
        raise ConfigError([f"{path}: tables or lists are nested too deeply"]) from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise ConfigError([f"{path}: not TOML: an integer with too many digits"]) from error
    if fault := data_fault(table):
        raise ConfigError([f"{path}: {fault}"])
    return table


@dataclass
class FileStack:
    """Files from weak to strong. The bases of a file come before it, and each file is listed once."""

    files: list[Path] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seen: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)
    texts: dict[str, str] = field(default_factory=dict)
    """Text of each file by its real path: one file may give several sections, and is opened once."""

    def __post_init__(self) -> None:
        self.seen |= {(os.path.realpath(path), section_of(path)) for path in self.files}

    def push(self, path: Path, section: tuple[str, ...] = (), depth: int = 0) -> bool | None:
        """Add a file after its bases. Return True if it has any, and None if the file was already listed."""
        identity = (os.path.realpath(path), section)
        if identity in self.seen:
            return None
        if depth > MAX_BASES_DEPTH or len(self.files) >= MAX_FILES:
            limit = f"{MAX_BASES_DEPTH} in one line" if depth > MAX_BASES_DEPTH else f"{MAX_FILES} in all"
            raise ConfigError([f"{path}: too many files inherit from one another through {BASES_KEY}: at most {limit}"])
        self.seen.add(identity)
        mark = in_section(path, section) if section else path
        self.files.append(mark)
        try:
            text = self._text(path, identity[0])
            table = parse_toml(path, text)
            bases = _bases(path, table)
        except ConfigError as error:
            self.faults += error.faults
            return False
        for base in bases:
            self.push(base, section, depth + 1)
        # The file goes after its bases. It was listed first so that a cycle of bases ends.
        self.files.remove(mark)
        self.files.append(mark)
        data: dict[str, Any] = table
        if section:
            data = {}
            set_at(data, section, table)
        self.layers.append(Layer(str(path), data, text=text, section=section))
        return bool(bases)

    def _text(self, path: Path, real: str) -> str:
        if real not in self.texts:
            self.texts[real] = read_text(path)
        return self.texts[real]

    def checked(self) -> FileStack:
        if self.faults:
            raise ConfigError(self.faults)
        return self


def _bases(path: Path, table: dict[str, Any]) -> list[Path]:
    """Remove `toml_files` from `table`, and return the files that it lists."""
    for key, value in table.items():
        if isinstance(value, dict) and BASES_KEY in value:
            raise ConfigError([f"{path}: {key}.{BASES_KEY}: move it to the top of the file"])
    names = table.pop(BASES_KEY, None)
    if names in (None, "None"):
        return []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError([f"{path}: {BASES_KEY}: should be a list of file names (got {names!r})"])
    return [path.parent / name for name in names]


def read_files(paths: Iterable[Path], texts: dict[str, str] | None = None) -> FileStack:
    """Read files and their bases. The last file is the strongest.

    `texts` holds the texts of files that were read before, by real path, and gets those that are read now.

    Raises:
        ConfigError: a file cannot be read. There is one fault for each such file.
    """
    stack = FileStack(texts={} if texts is None else texts)
    for path in paths:
        stack.push(Path(path), section_of(path))
    return stack.checked()


def split_files(args: Sequence[str], is_flag: Callable[[str], bool]) -> tuple[list[Path], list[str]]:
    """Separate `@ file`, `@file` and `--section @ file` from the other arguments.

    An option before `@` names a section, unless `is_flag(option)` is true: a boolean flag is an argument of its own.

    Raises:
        ConfigError: an `@` is not followed by a file.
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
    """Return the files in the arguments, each after its bases, and the other arguments.

    Pass the paths to `set_toml_files` unchanged: the path of a section's file remembers its section. With
    `config_cls`, a boolean flag before an `@` is not taken for a section.
    """
    paths, remaining = split_files(args, lambda flag: config_cls is not None and is_boolean_flag(config_cls, flag))
    return read_files(paths).files, remaining


def check_path_and_handle_inheritance(path: Path, seen_files: list[Path], nested_key: str | None = None) -> bool | None:
    """Append a file to `seen_files`, after its bases. Return True if it has any, and None if it was already listed."""
    stack = FileStack(files=seen_files)
    followed = stack.push(Path(path), tuple(nested_key.split(".")) if nested_key else ())
    stack.checked()
    return followed


def get_temp_toml_file() -> Path:
    """Return an unused path for a TOML file in `.pydantic_config/`. The caller deletes the file."""
    directory = Path(".pydantic_config")
    directory.mkdir(exist_ok=True)
    return directory / f"{uuid4().hex}.toml"
