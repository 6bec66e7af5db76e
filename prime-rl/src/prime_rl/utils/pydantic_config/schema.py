"""Inspects config classes: their keys, sections, unions and types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

from prime_rl.utils.tables import KeyPath

Section = type[BaseModel]
MAX_INDEX_DIGITS = 20
NAMED = "NAME"
"""Stands in a path for the name that the user gives to a section."""


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself. `Annotated` is unwrapped."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return tuple(member for part in get_args(annotation) for member in alternatives(part))
    return (annotation,)


def sections_among(kinds: Iterable[Any]) -> tuple[Section, ...]:
    return tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))


def sections_of(field: FieldInfo) -> tuple[Section, ...]:
    """Return the config classes that a field may hold: none, one, or the variants of a union."""
    return sections_among(alternatives(field.annotation))


def list_items(kinds: Iterable[Any]) -> tuple[Any, ...] | None:
    """Return the item types of the list in `kinds`, or None if there is no list."""
    for kind in kinds:
        if get_origin(kind) is list:
            return alternatives(get_args(kind)[0])
    return None


def table_items(kinds: Iterable[Any]) -> tuple[Any, ...] | None:
    """Return the types of the sections in the table in `kinds`, whose names the user chooses; None if there is none."""
    for kind in kinds:
        if get_origin(kind) is dict and sections_among(found := alternatives(get_args(kind)[1])):
            return found
    return None


def is_nullable(kinds: Iterable[Any]) -> bool:
    return NoneType in kinds


def is_table(kinds: Iterable[Any]) -> bool:
    """Whether one of `kinds` is a dict, whose keys the user chooses."""
    return any(get_origin(kind) is dict for kind in kinds)


def literals(kinds: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind))


def tag_of(section: Section) -> str | None:
    """Return the `type` that selects this class in a union."""
    field = section.model_fields.get("type")
    return field.default if field is not None else None


@cache
def union_fields(section: Section) -> dict[str, str]:
    """Return the union fields of `section`, and the `type` of each one's default."""
    return {
        name: field.get_default(call_default_factory=True).type
        for name, field in section.model_fields.items()
        if len(sections_of(field)) > 1
    }


def spellings(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Return the names that a file may use for this field."""
    alias = field.validation_alias
    return tuple(str(choice) for choice in alias.choices) if isinstance(alias, AliasChoices) else (name,)


def find_field(section: Section, key: str) -> tuple[str, FieldInfo] | None:
    """Find a field by its name, in any case, with dashes or underscores."""
    wanted = key.replace("-", "_").lower()
    for name, field in section.model_fields.items():
        if wanted in spellings(name, field):
            return wanted, field
    return None


@dataclass(frozen=True, slots=True)
class KeySite:
    """A key: its path in a file, and the types that it accepts."""

    path: KeyPath
    """Items of a list have their index, counted from 0."""
    kinds: tuple[Any, ...]

    @property
    def is_flag(self) -> bool:
        return bool in self.kinds

    @property
    def is_section(self) -> bool:
        return bool(sections_among(self.kinds))


def find_key(root: Section, dotted: str) -> KeySite | None:
    """Find a key by its dotted name, through optional sections, all variants of a union, and lists of sections.

    `env.0.id` is the id of the first item of a list, `judge.NAME.model` a key of a named section.
    None if there is no such key.
    """
    path: list[str | int] = []
    kinds: tuple[Any, ...] = (root,)
    for part in dotted.split("."):
        items = list_items(kinds)
        if items is not None and sections_among(items) and part.isdecimal():
            path.append(int(part[:MAX_INDEX_DIGITS]))  # Python converts no more than 4300
            kinds = items
            continue
        if (named := table_items(kinds)) is not None:
            path.append(part)
            kinds = named
            continue
        found = [match for section in sections_among(kinds) if (match := find_field(section, part))]
        if not found:
            return None
        path.append(found[0][0])
        kinds = tuple(dict.fromkeys(kind for _, field in found for kind in alternatives(field.annotation)))
    return KeySite(tuple(path), kinds)


def sections_below(owners: Sequence[Section], name: str) -> tuple[Section, ...]:
    """Return the sections in key `name` of `owners`: a section, the variants of a union, or items of a list.

    Sections that the user names are below their names, and not here.
    """
    kinds = [
        kind
        for owner in owners
        if (found := find_field(owner, name)) is not None
        for kind in alternatives(found[1].annotation)
    ]
    return (*sections_among(kinds), *sections_among(list_items(kinds) or ()))


def named_below(owners: Sequence[Section], name: str) -> tuple[Section, ...]:
    """Return the sections in key `name` of `owners` to which the user gives names."""
    found = (match[1] for owner in owners if (match := find_field(owner, name)) is not None)
    return tuple(
        section for field in found for section in sections_among(table_items(alternatives(field.annotation)) or ())
    )


def has_key(root: Section, path: Sequence[str]) -> bool:
    """Whether a key exists at `path`, which has no list indices. Every key exists inside a dict of the user's."""
    owners: tuple[Section, ...] = (root,)
    for length, part in enumerate(path, start=1):
        found = [match for owner in owners if (match := find_field(owner, part)) is not None]
        if not found:
            return False
        tables = [alternatives(field.annotation) for _, field in found if is_table(alternatives(field.annotation))]
        if tables:
            named = table_items(tables[0])
            rest = path[length + 1 :]
            return named is None or not rest or any(has_key(section, rest) for section in sections_among(named))
        owners = sections_below(owners, part)
        if length == len(path):
            return True
    return False


def shortcuts_of(root: Section) -> Mapping[str, str]:
    """Options of `root` with a name of their own, and the dotted key that each sets."""
    shortcuts: Mapping[str, str] = getattr(root, "shortcuts", {})
    return shortcuts


def find_negated(root: Section, name: str) -> KeySite | None:
    """Find the flag or optional key that `no-<key>` switches off."""
    if name[:3].lower() not in ("no-", "no_"):
        return None
    site = find_key(root, name[3:])
    return site if site is not None and (site.is_flag or is_nullable(site.kinds)) else None


def is_boolean_flag(root: Section, flag: str) -> bool:
    """Whether `flag` (`--name` or `--no-name`) needs no value, so that an `@` after it is a new argument."""
    site = find_key(root, flag[2:])
    return site.is_flag if site is not None else find_negated(root, flag[2:]) is not None


def walk_fields(section: Section, prefix: Sequence[str] = ()) -> Iterator[tuple[tuple[str, ...], Section, FieldInfo]]:
    """Yield path, class and field of every key, parents first, through optional sections and all variants."""
    for name, field in section.model_fields.items():
        path = (*prefix, name)
        yield path, section, field
        kinds = alternatives(field.annotation)
        for child in (*sections_among(kinds), *sections_among(list_items(kinds) or ())):
            yield from walk_fields(child, path)
        for child in sections_among(table_items(kinds) or ()):
            yield from walk_fields(child, (*path, NAMED))


def get_all_fields(model: BaseModel | Section) -> list[str]:
    """Return dotted keys, parents first, without those of optional sections and unions."""
    section = model if isinstance(model, type) else type(model)
    keys: list[str] = []
    for name, field in section.model_fields.items():
        keys.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += [f"{name}.{key}" for key in get_all_fields(field.annotation)]
    return keys
