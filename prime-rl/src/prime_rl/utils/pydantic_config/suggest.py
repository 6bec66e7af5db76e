"""Suggests a key for one that does not exist, or nothing if no suggestion is safe."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prime_rl.utils.pydantic_config.schema import (
    Section,
    find_field,
    find_key,
    has_key,
    is_table,
    list_items,
    named_below,
    sections_among,
    sections_below,
    table_items,
    tag_of,
    walk_fields,
)
from prime_rl.utils.tables import KeyPath

MOST_PLACES = 2
"""Most sections to suggest. If more of them have the name, it does not say which one was meant."""


def advice_for_key(root: Section, dotted: str, as_flag: bool = False) -> str | None:
    """Return a hint for a key that `root` does not have: its name here, or a similar key. None without a safe guess.

    `dotted` is a key as in a file or, with `as_flag`, an option without its leading dashes. Keys in the hint are
    spelled in the same way.
    """
    parts = dotted.replace("-", "_").lower().split(".") if as_flag else dotted.split(".")
    known = advice_for_renamed(root, tuple(parts), as_flag)
    if known is not None:
        return known
    own_name = getattr(root, "component", "")
    if parts == [own_name]:
        return f"leave out `{own_name}`: this is the config of {own_name} itself"
    if as_flag and _is_list_of_values(root, parts):
        option = as_option(root, parts[:-1])
        return f"the items of a list are given together: {option} a,b"
    if as_flag and (advice := _advice_for_item_of_table(root, dotted)) is not None:
        return advice
    inner = parts[1:] if parts[0] == own_name else []
    nearest = [tuple(inner)] if inner and has_key(root, inner) else nearest_keys(root, tuple(inner or parts))
    shown = [as_option(root, key) if as_flag else ".".join(key) for key in nearest]
    return f"did you mean {' or '.join(shown)}?" if shown else None


def _advice_for_item_of_table(root: Section, dotted: str) -> str | None:
    """How to set an item of a table whose keys the user chooses, if `dotted` leads into one."""
    parts = dotted.split(".")
    for length in range(1, len(parts)):
        site = find_key(root, ".".join(parts[:length]))
        if site is not None and is_table(site.kinds) and table_items(site.kinds) is None:
            option, item = ".".join(parts[:length]), ".".join(parts[length:])
            return f"the items of a table are given together: --{option} {item}=VALUE"
    return None


def as_option(root: Section, path: Sequence[str]) -> str:
    """Write a key as an option. Where it leads into a list of sections without an index, it gets the first one's."""
    parts: list[str] = []
    for part in path:
        site = find_key(root, ".".join(parts)) if parts else None
        if site is not None and sections_among(list_items(site.kinds) or ()) and not _is_index(part):
            parts.append("0")
        parts.append(part)
    return f"--{'.'.join(parts).replace('_', '-')}"


def _is_list_of_values(root: Section, parts: Sequence[str]) -> bool:
    """Whether `parts` is an item of a list that holds no sections."""
    site = find_key(root, ".".join(parts[:-1])) if len(parts) > 1 and _is_index(parts[-1]) else None
    items = list_items(site.kinds) if site is not None else None
    return items is not None and not sections_among(items)


def advice_for_renamed(root: Section, parts: KeyPath, as_flag: bool = False) -> str | None:
    """Return a hint for a key of another version, or None for any other key."""
    hook: Callable[[str, bool], str | None] = getattr(root, "advice_for_key", lambda *_: None)
    return hook(".".join(str(part) for part in parts if not _is_index(part)), as_flag)


def nearest_keys(root: Section, path: KeyPath) -> list[tuple[str, ...]]:
    """Return the keys that may be meant: one with a similar name in the section, or the same name in others."""
    parents, owners = _existing(root, path)
    wrong, rest = str(path[len(parents)]), tuple(str(part) for part in path[len(parents) + 1 :])
    names = list(dict.fromkeys(name for owner in owners for name in owner.model_fields if name != "toml_files"))
    for name in names:
        if is_misspelling(wrong, name) and has_key(
            root, [part for part in (*parents, name, *rest) if not _is_index(part)]
        ):
            return [(*parents, name, *rest)]
    tail = tuple(part for part in (wrong, *rest) if not _is_index(part))
    elsewhere = dict.fromkeys(
        key for key, _, _ in walk_fields(root) if key[-len(tail) :] == tail and key != ("toml_files",)
    )
    return list(elsewhere) if len(elsewhere) <= MOST_PLACES else []


def is_misspelling(wrong: str, name: str) -> bool:
    """Whether `wrong` is `name` with a typing error in one or two words, or with different underscores.

    Words are compared one by one, so that `keep_best` is not taken for `keep_last`, nor `max_tokens` for `min_tokens`.
    """
    wrong, name = wrong.replace("-", "_").lower(), name.lower()
    if wrong.replace("_", "") == name.replace("_", ""):
        return True
    words, names = wrong.split("_"), name.split("_")
    if len(words) != len(names):
        return False
    changed = [(word, right) for word, right in zip(words, names, strict=True) if word != right]
    return len(changed) <= 2 and all(_one_slip(word, right) for word, right in changed)


def _one_slip(word: str, right: str) -> bool:
    """Whether one letter was added, omitted or swapped with the next or, in words of four letters or more, replaced."""
    longer, shorter = (word, right) if len(word) >= len(right) else (right, word)
    if len(longer) == len(shorter) + 1:
        return bool(shorter) and any(longer[:at] + longer[at + 1 :] == shorter for at in range(len(longer)))
    if len(longer) != len(shorter):
        return False
    different = [at for at in range(len(word)) if word[at] != right[at]]
    if len(different) == 2:
        one, other = different
        return other == one + 1 and word[one] == right[other] and word[other] == right[one]
    return len(different) == 1 and len(word) >= 4 and not right[different[0]].isdigit()


def _existing(root: Section, path: KeyPath) -> tuple[tuple[str, ...], tuple[Section, ...]]:
    """Return the leading part of `path` that exists, and the classes of its last section."""
    parents: tuple[str, ...] = ()
    owners: tuple[Section, ...] = (root,)
    named: tuple[Section, ...] = ()
    for part in path[:-1]:
        if named:  # `part` is the user's name
            below, named = named, ()
        else:
            below = owners if _is_index(part) else sections_below(owners, str(part))
            named = () if _is_index(part) else named_below(owners, str(part))
        if not below and not named:
            break
        owners = below or owners
        parents = (*parents, str(part))
    return parents, owners


def variants_with(variants: tuple[Section, ...], key: str) -> list[str]:
    """Return the `type` of each variant that has this key."""
    return [str(tag_of(variant)) for variant in variants if find_field(variant, key) is not None]


def _is_index(part: str | int) -> bool:
    return isinstance(part, int) or part.isdigit()
