"""What to write instead of a key that does not exist."""

from __future__ import annotations

from difflib import get_close_matches

from prime_rl.utils.pydantic_config.layers import KeyPath
from prime_rl.utils.pydantic_config.schema import (
    Section,
    alternatives,
    find_field,
    list_items,
    sections_among,
    tag_of,
    walk_fields,
)


def advice_for_key(root: Section, dotted: str, as_flag: bool = False) -> str:
    """Advice for a key that `root` lacks: its new name, its place elsewhere, or the key most like it.

    `dotted` is the key as in a file, or an option without its dashes (`as_flag`), which the answer then looks like.
    """
    parts = dotted.replace("-", "_").lower().split(".") if as_flag else dotted.split(".")
    known = getattr(root, "advice_for_key", lambda _: None)(".".join(part for part in parts if not part.isdigit()))
    if known is not None:
        return known
    nearest = nearest_key(root, tuple(parts))
    return f"did you mean {'--' + nearest.replace('_', '-') if as_flag else nearest}?"


def nearest_key(root: Section, path: KeyPath) -> str:
    """The valid key most like `path`: in the same section, else one of this name elsewhere, else anything there."""
    keys = [found for found, _, _ in walk_fields(root)]
    if deeper := [key for key in keys if key[-len(path) :] == path]:
        return ".".join(min(deeper, key=len))
    parents: tuple[str, ...] = ()
    owners: tuple[Section, ...] = (root,)
    for part in path[:-1]:
        below = _below(owners, str(part))
        if not below and isinstance(part, str) and not part.isdigit():
            path = (*parents, part)
            break
        owners = below or owners
        parents = (*parents, str(part))
    wrong = str(path[-1])
    names = list(dict.fromkeys(name for owner in owners for name in owner.model_fields if name != "toml_files"))
    close = get_close_matches(wrong, names, 1)
    if not close:
        if elsewhere := [key for key in keys if key[-1] == wrong]:
            return ".".join(min(elsewhere, key=len))
        close = get_close_matches(wrong, names, 1, cutoff=0.0) or names[:1]
    return ".".join((*parents, close[0]))


def variants_with(variants: tuple[Section, ...], key: str) -> list[str]:
    """The `type`s of the union's other variants that have this key."""
    return [str(tag_of(variant)) for variant in variants if find_field(variant, key) is not None]


def _below(owners: tuple[Section, ...], part: str) -> tuple[Section, ...]:
    kinds = [
        kind
        for owner in owners
        if (found := find_field(owner, part)) is not None
        for kind in alternatives(found[1].annotation)
    ]
    return (*sections_among(kinds), *sections_among(list_items(kinds) or ()))
