"""A mypy plugin that writes down which attributes of config classes are read, and where."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from mypy.plugin import AttributeContext, Plugin
from mypy.types import Instance, Type, TypeVarType, UnionType, get_proper_type

CONFIGS = "prime_rl.configs."


class NoteReads(Plugin):
    """Appends a line to the file `$KEY_READS` for each read: class, attribute, file, line."""

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        if not fullname.startswith(CONFIGS):
            return None
        definer, _, attribute = fullname.rpartition(".")

        def note(context: AttributeContext) -> Type:
            place = f"{Path(context.api.path).resolve()} {context.context.line}"
            owners = {name for name in _classes(context.type) if definer in name[1]}
            with Path(os.environ["KEY_READS"]).open("a", encoding="utf-8") as lines:
                lines.writelines(f"{owner} {attribute} {place}\n" for owner, _ in owners)
            return context.default_attr_type

        return note


def _classes(annotation: Type) -> Iterator[tuple[str, frozenset[str]]]:
    """The classes that a value may have: each one's name, and the names of its parents and itself."""
    proper = get_proper_type(annotation)
    if isinstance(proper, Instance):
        yield proper.type.fullname, frozenset(parent.fullname for parent in proper.type.mro)
    elif isinstance(proper, UnionType):
        for item in proper.items:
            yield from _classes(item)
    elif isinstance(proper, TypeVarType):
        for bound in proper.values or [proper.upper_bound]:
            yield from _classes(bound)


def plugin(version: str) -> type[Plugin]:
    return NoteReads
