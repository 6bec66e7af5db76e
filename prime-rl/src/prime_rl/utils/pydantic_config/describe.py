"""Describes keys for `--help` and the generated reference, from the config classes and their docstrings."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import PurePath
from types import NoneType
from typing import Any, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from prime_rl.utils.pydantic_config.schema import (
    Section,
    alternatives,
    find_key,
    list_items,
    sections_among,
    shortcuts_of,
    tag_of,
    walk_fields,
)

_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def type_text(annotation: Any) -> str:
    """Return a type such as `int`, `list[str]`, `LoRAConfig` or `'a' | 'b'`. A final `?` means that None is allowed."""
    kinds = alternatives(annotation)
    names = [_kind_text(kind) for kind in kinds if kind is not NoneType]
    return " | ".join(names) + ("?" if NoneType in kinds else "")


def default_text(field: FieldInfo) -> str:
    """Return the default in TOML syntax, or `required`."""
    if field.is_required():
        return "required"
    return value_text(field.get_default(call_default_factory=True))


def value_text(value: Any) -> str:
    if isinstance(value, BaseModel):
        tag = tag_of(type(value))
        return f'{{type = "{tag}"}}' if isinstance(tag, str) else "{}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | PurePath):
        return f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(value_text(item) for item in value)}]"
    return "None" if value is None else str(value)


def bounds_text(field: FieldInfo) -> str:
    """Return bounds such as `>= 1, <= 8`, of the field or a member of its union. Empty without bounds."""
    lengths = [each for each in _constraints(field) if isinstance(each, annotated_types.MinLen)]
    return ", ".join([*(f"at least {each.min_length} item" for each in lengths), *_bounds(field, _SIGNS)])


def range_text(field: FieldInfo, unbounded: str = "a finite number") -> str:
    """Return bounds such as `at least 1 and at most 8`, or `a finite number at least 0` without an upper one."""
    bounds = _bounds(field, _WORDS)
    has_upper = any(bound.startswith(("at most", "below")) for bound in bounds)
    return " and ".join(bounds) if has_upper else " ".join(filter(None, [unbounded, *bounds]))


def _bounds(field: FieldInfo, words: Mapping[str, str]) -> list[str]:
    found = []
    for constraint in _constraints(field):
        bounds = {word: getattr(constraint, name) for name, word in words.items() if hasattr(constraint, name)}
        found += [f"{word} {_number(bound)}" for word, bound in bounds.items()]
    return found


def _number(value: float) -> str:
    return f"{value:_}" if abs(value) >= 1_000_000 else str(value)


def _constraints(field: FieldInfo) -> list[Any]:
    return [*field.metadata, *_nested_metadata(field.annotation)]


def field_doc(section: Section, name: str) -> str:
    """Return the docstring of a field, from its class or the parent that declares it."""
    for owner in section.__mro__:
        doc = _class_docs(owner.__module__).get(owner.__name__, {}).get(name)
        if doc is not None:
            return doc
    return ""


def _kind_text(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is list:
        return f"list[{type_text(get_args(kind)[0])}]"
    if origin is dict:
        return "table"
    if origin is not None:
        return " | ".join(repr(value) for value in get_args(kind))
    return "path" if kind.__name__ == "Path" else kind.__name__


def _nested_metadata(annotation: Any) -> list[Any]:
    """Constraints of the members of a union or of a list's items, as in `Annotated[int, Ge(1)] | str`."""
    metadata = []
    for part in get_args(annotation):
        for extra in getattr(part, "__metadata__", ()):
            metadata += extra.metadata if isinstance(extra, FieldInfo) else [extra]
        if get_origin(part) is list:
            metadata += _nested_metadata(part)
    return metadata


@cache
def _class_docs(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of all fields in a module, by class and field name."""
    if module not in sys.modules or not module.startswith("prime_rl"):
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _field_docs(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _field_docs(node: ast.ClassDef) -> dict[str, str]:
    docs = {}
    for statement, below in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            docs[statement.target.id] = " ".join(below.value.value.split())
    return docs


_USAGE = """\
usage: {name} [@ FILE | --SECTION @ FILE | --OPTION VALUE] ...

{doc}

Files are TOML; later files win over earlier ones, options over files. Dashes and underscores are the same.
  --flag / --no-flag        switch a boolean
  --section / --no-section  switch an optional section on or off
  --list a,b                items by commas, by repeating the option, or as a JSON array
  --key null                no value
{extras}
"""


def help_text(root: Section, allow_extras: bool = False) -> str:
    """Return the usage, and type, default, bounds and meaning of each option."""
    extras = "Options that are not listed here are passed on to the engine.\n" if allow_extras else ""
    name = getattr(root, "component", "") or root.__name__
    lines = [
        _USAGE.format(name=name.replace("_", "-"), doc=inspect.cleandoc(root.__doc__ or ""), extras=extras).rstrip(),
        "",
        "options:",
    ]
    seen: set[tuple[str, ...]] = set()
    for path, owner, field in walk_fields(root):
        in_list = any(_is_list_below(root, path, length) for length in range(1, len(path)))
        if path in seen or in_list or path[-1] == "toml_files":
            continue
        seen.add(path)
        kind = "section" if sections_among(alternatives(field.annotation)) else type_text(field.annotation)
        facts = ", ".join(part for part in (kind, bounds_text(field), f"default {default_text(field)}") if part)
        flag = "--" + ".".join(path).replace("_", "-")
        short = next((f", --{name}" for name, key in shortcuts_of(root).items() if key == ".".join(path)), "")
        lines += [f"  {flag}{short}  ({facts})", f"      {field_doc(owner, path[-1])}"]
    return "\n".join(lines) + "\n"


def _is_list_below(root: Section, path: tuple[str, ...], length: int) -> bool:
    site = find_key(root, ".".join(path[:length]))
    return site is None or list_items(site.kinds) is not None
