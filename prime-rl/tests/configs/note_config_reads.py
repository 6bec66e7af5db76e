"""A mypy plugin that records where attributes of config classes, or of protocols for them, are read or called."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from mypy.plugin import AttributeContext, MethodContext, Plugin
from mypy.types import Instance, Type, TypeVarType, UnionType, get_proper_type

CONFIGS = "prime_rl.configs."
PACKAGES = ("prime_rl.", "medarc_rl.")


class NoteReads(Plugin):
    """Appends a line to the file `$KEY_READS` for each read: class, attribute, file, line."""

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        if not fullname.startswith(PACKAGES):
            return None

        def note(context: AttributeContext) -> Type:
            _note_read(fullname, context)
            return context.default_attr_type

        return note

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        if not fullname.startswith(PACKAGES):
            return None

        def note(context: MethodContext) -> Type:
            _note_read(fullname, context)
            return context.default_return_type

        return note


def _note_read(fullname: str, context: AttributeContext | MethodContext) -> None:
    definer, _, attribute = fullname.rpartition(".")
    place = f"{Path(context.api.path).resolve()} {context.context.line}"
    owners = {name for name in _classes(context.type) if definer in name[1]}
    if owners:
        with Path(os.environ["KEY_READS"]).open("a", encoding="utf-8") as lines:
            lines.writelines(f"{owner} {attribute} {place}\n" for owner, _ in owners)


def _classes(annotation: Type) -> Iterator[tuple[str, frozenset[str]]]:
    """The classes that a value may have: each one's name, and the names of its parents and itself."""
    proper = get_proper_type(annotation)
    if isinstance(proper, Instance) and (proper.type.is_protocol or proper.type.fullname.startswith(CONFIGS)):
        yield proper.type.fullname, frozenset(parent.fullname for parent in proper.type.mro)
    elif isinstance(proper, UnionType):
        for item in proper.items:
            yield from _classes(item)
    elif isinstance(proper, TypeVarType):
        for bound in proper.values or [proper.upper_bound]:
            yield from _classes(bound)


def plugin(version: str) -> type[Plugin]:
    return NoteReads
