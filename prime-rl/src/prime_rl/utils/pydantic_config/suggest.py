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
    """The valid key most like `path`: in its section, or of the same name in another one."""
    keys = [key for key, _, _ in walk_fields(root)]
    parents, owners = _existing(root, path)
    names = list(dict.fromkeys(name for owner in owners for name in owner.model_fields if name != "toml_files"))
    wrong = str(path[len(parents)])
    close = get_close_matches(wrong, names, 1)
    in_place = len(parents) == len(path) - 1
    # Of a path whose section does not exist, the end may: `optim.lr` is there, though not at the top.
    for start in range(len(path)):
        tail = path[start:]
        if in_place and start > 0 and close:
            break
        if elsewhere := [key for key in keys if key[-len(tail) :] == tail]:
            return ".".join(min(elsewhere, key=len))
    close = close or get_close_matches(wrong, names, 1, cutoff=0.0) or names[:1]
    return ".".join((*parents, close[0]))


def _existing(root: Section, path: KeyPath) -> tuple[tuple[str, ...], tuple[Section, ...]]:
    """The part of `path` that exists as sections, and what the last of them may hold."""
    parents: tuple[str, ...] = ()
    owners: tuple[Section, ...] = (root,)
    for part in path[:-1]:
        is_index = isinstance(part, int) or part.isdigit()
        below = owners if is_index else _below(owners, part)
        if not below:
            break
        owners = below
        parents = (*parents, str(part))
    return parents, owners


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
