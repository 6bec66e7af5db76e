"""The settings of one file during a migration: each is placed, dropped or refused exactly once.

Also finds the command and the version that a file is for, and writes keys and values as TOML.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, Literal

from medarc_rl.errors import UsageError
from prime_rl.configs.surface.meanings import NEWER_VALUES, Version
from prime_rl.configs.surface.renamed import NEWER, OLDER, SECTIONS_OF_RL, find_renamed, is_current, split_component
from prime_rl.configs.surface.root import ROOTS, unknown_counts
from prime_rl.utils.pydantic_config.layers import Layer
from prime_rl.utils.tables import KeyPath, leaves

Verdict = Literal["moved", "dropped", "not carried", "note", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    verdict: Verdict
    text: str
    origin: KeyPath | None = None
    """Setting of the old file that caused it; None is the whole file."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A setting of the new file, and the old setting that it comes from."""

    value: Any
    origin: KeyPath


@dataclass
class Draft:
    """The settings of one file. `left` holds those that are not decided yet."""

    kind: str
    """Command that the file is for."""
    versions: Collection[Version]
    source: Mapping[KeyPath, Any]
    left: dict[KeyPath, Any] = field(init=False)
    placed: dict[KeyPath, Placed] = field(default_factory=dict)
    dropped: set[KeyPath] = field(default_factory=set)
    refused: set[KeyPath] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = dict(self.source)

    @property
    def data(self) -> dict[str, Any]:
        """The content of the new file so far."""
        return assemble({path: placed.value for path, placed in self.placed.items()})

    def qualified(self, path: KeyPath) -> str:
        """The dotted key from its component, without indices: `trainer.optim.lr`, `rl.max_steps`."""
        return ".".join(split_component(self.kind, ".".join(names(path))))

    def located(self, key: str) -> KeyPath | None:
        """Path in this file of a key that starts with its component; None if such a file cannot contain it."""
        component, *rest = key.split(".")
        if component == self.kind:
            return tuple(rest)
        has_section = self.kind == "rl" or (self.kind in ("eval", "sft") and component == "inference")
        return (component, *rest) if has_section and component in SECTIONS_OF_RL else None

    def below(self, path: KeyPath) -> dict[KeyPath, Any]:
        """The undecided settings at or below `path`."""
        return {each: value for each, value in self.left.items() if each[: len(path)] == path}

    def holds(self, path: KeyPath) -> bool:
        """Whether the file sets something at or below `path`, decided or not."""
        return any(each[: len(path)] == path for each in (*self.left, *self.placed))

    def keep(self, origin: KeyPath) -> None:
        self.placed[origin] = Placed(self.left.pop(origin), origin)

    def move(self, origin: KeyPath, targets: Mapping[KeyPath, Any]) -> bool:
        """Place a setting at new paths. If one of them is taken, drop or refuse it. Returns whether it was placed."""
        missing = dict(targets)
        for target, value in targets.items():
            for path, other in self._overlapping(origin, target):
                if value != {} and (path, other) != (target, value):
                    self.refuse(origin, f"{key_text(path)} is also set", "remove one")
                    return False
                missing.pop(target, None)
        if not missing:
            self.drop(origin, f"{key_text(next(iter(targets)))} has the same value")
            return False
        del self.left[origin]
        self.placed |= {target: Placed(value, origin) for target, value in missing.items()}
        return True

    def drop(self, origin: KeyPath, why: str) -> None:
        """Leave out a setting that changes nothing in this version."""
        self.dropped.add(origin)
        self._tell("dropped", origin, self.left.pop(origin), why)

    def refuse(self, origin: KeyPath, why: str, instead: str) -> None:
        """Leave out a setting that this version cannot honour."""
        self.refused.add(origin)
        self._tell("not carried", origin, self.left.pop(origin), f"{why}; {instead}" if instead else why)

    def take_back(self, target: KeyPath) -> KeyPath:
        """Undo the decision on the setting that was placed at `target`. Returns its path in the old file."""
        origin = self.placed[target].origin
        self.placed = {path: placed for path, placed in self.placed.items() if placed.origin != origin}
        self.findings = [each for each in self.findings if each.origin != origin]
        self.left[origin] = self.source.get(origin, {})
        return origin

    def note(self, text: str) -> None:
        self.findings.append(Finding("note", text))

    def _tell(self, verdict: Verdict, origin: KeyPath, value: Any, why: str) -> None:
        self.findings.append(Finding(verdict, f"{key_text(origin)} = {shown(value)}: {why}", origin))

    def _overlapping(self, origin: KeyPath, target: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
        """Other settings at `target`, above it or below it, or that make a table of the list which it is in."""
        decided = {path: placed.value for path, placed in self.placed.items()}
        for path, value in (self.left | decided).items():
            if path != origin and _excludes(path, value, target):
                yield path, value


def _excludes(path: KeyPath, value: Any, target: KeyPath) -> bool:
    """Whether a file that sets `path` cannot also set `target`."""
    for part, other in zip(path, target, strict=False):
        if part != other:
            return isinstance(part, int) != isinstance(other, int)
    return len(path) >= len(target) or value != {}


# Settings as paths and values


def names(path: KeyPath) -> tuple[str, ...]:
    """The path without indices."""
    return tuple(part for part in path if isinstance(part, str))


def assemble(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """The inverse of `leaves`. Missing indices are closed up."""
    return _assembled(values) if values else {}


def _assembled(values: Mapping[KeyPath, Any]) -> Any:
    if set(values) == {()}:
        return values[()]
    groups: dict[str | int, dict[KeyPath, Any]] = {}
    for path, value in values.items():
        if path:
            groups.setdefault(path[0], {})[path[1:]] = value
    if any(isinstance(head, int) for head in groups):
        return [_assembled(groups[index]) for index in sorted(groups, key=int)]
    return {head: _assembled(group) for head, group in groups.items()}


# Keys and values as TOML text, on one line


_BARE = re.compile(r"[A-Za-z0-9_-]+")


_ESCAPES = {"\\": "\\\\", '"': '\\"', "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


_LONGEST_SHOWN = 60


def key_text(path: KeyPath) -> str:
    """A dotted key as written in a file, without indices."""
    return ".".join(name_text(part) for part in path if isinstance(part, str))


def name_text(name: str) -> str:
    return name if _BARE.fullmatch(name) else _quoted(name)


def value_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        pairs = ", ".join(f"{name_text(name)} = {value_text(item)}" for name, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    return _quoted(value) if isinstance(value, str) else repr(value)


def shown(value: Any) -> str:
    """`value_text`, shortened for a message."""
    text = value_text(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def _quoted(text: str) -> str:
    escaped = (_ESCAPES.get(char) or (char if char.isprintable() else _unicode_escape(char)) for char in text)
    return f'"{"".join(escaped)}"'


def _unicode_escape(char: str) -> str:
    return f"\\u{ord(char):04X}" if ord(char) <= 0xFFFF else f"\\U{ord(char):08X}"


# Which command and which version a file is for


IN_EVERY_VERSION = ("clean",)
"""Keys that older and newer versions share. They do not identify the version."""


def kind_of(settings: Mapping[KeyPath, Any]) -> str:
    """The command whose config knows the most of these keys.

    Raises:
        UsageError: no command knows any of them, or several know equally many.
    """
    unknown = unknown_counts(".".join(names(path)) for path in settings)
    fewest = min(unknown.values())
    likely = [kind for kind, count in unknown.items() if count == fewest]
    if fewest == len(settings):
        raise UsageError("no PRIME-RL command has any of its keys: give the command with --as, such as --as rl")
    if len(likely) > 1:
        raise UsageError(f"its keys belong to {' and '.join(likely)}: choose one with --as, such as --as {likely[0]}")
    return likely[0]


def versions_of(kind: str, settings: Mapping[KeyPath, Any]) -> set[Version]:
    """The versions whose keys or values the file uses; empty if this version has them all."""
    versions: set[Version] = set()
    for path, value in settings.items():
        component, key = split_component(kind, ".".join(names(path)))
        found = None if is_current(ROOTS[kind], kind, names(path)) else find_renamed(component, key)
        if found is not None and path[-1] not in IN_EVERY_VERSION:
            versions |= {"older"} if found[0] in OLDER else {"newer"} if found[0] in NEWER else set()
        if any(each.applies(f"{component}.{key}", value, ()) for each in NEWER_VALUES):
            versions.add("newer")
    return versions


def suggested_migrations(kind: str, layers: Iterable[Layer]) -> Iterator[str]:
    """A line for each file of another version among the sources of a config that does not load."""
    for layer in layers:
        versions = versions_of(kind, dict(leaves(layer.data)))
        if versions and Path(layer.name).is_file():
            yield f"{layer.name} is for another version of PRIME-RL: `medarc_train migrate {layer.name}` rewrites it"
