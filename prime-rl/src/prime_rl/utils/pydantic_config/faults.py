"""Turns Pydantic's errors into messages for the author of a config, and suggests keys for those that do not exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from prime_rl.utils.errors import MAX_FAULTS
from prime_rl.utils.pydantic_config.describe import range_text, value_text
from prime_rl.utils.pydantic_config.layers import Layer
from prime_rl.utils.pydantic_config.schema import (
    Section,
    alternatives,
    find_field,
    find_key,
    has_key,
    is_table,
    list_items,
    literals,
    named_below,
    sections_among,
    sections_below,
    table_items,
    tag_of,
    walk_fields,
)
from prime_rl.utils.tables import KeyPath, dotted, leaves

# Keys to suggest for one that does not exist. None if no suggestion is safe.


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
    # `lr` is more likely that of `optim` than that of `critic.optim`.
    found = sorted(elsewhere, key=len)
    if len(found) > MOST_PLACES:
        found = [key for key in found if len(key) == len(found[0])]
    return found if len(found) <= MOST_PLACES else []


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


_OUT_OF_RANGE = frozenset(
    {"finite_number", "greater_than", "greater_than_equal", "int_parsing_size", "less_than", "less_than_equal"}
)

_ONE_VALUE = {"int_type": "integer", "float_type": "number", "bool_type": "boolean", "string_type": "string"}
"""What a key accepts that is given a list, by the kind of Pydantic's error."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an error is: the key, the classes that may have it, and the `type` that the config selects."""

    path: KeyPath
    variants: tuple[Section, ...]
    """More than one if the key's section is a union."""
    tag: str | None
    kinds: tuple[Any, ...]
    """Types that the key accepts. Empty if the key does not exist."""
    field: FieldInfo | None = None

    @property
    def key(self) -> str:
        return dotted(self.path)


def faults_of(root: Section, error: ValidationError, layers: Sequence[Layer]) -> list[str]:
    """Return one line for each wrong key. What the members of a union say about one value is joined."""
    complaints: dict[tuple[str, str], list[str]] = {}
    for number, detail in enumerate(_written(root, error, layers)):
        place = locate(root, detail["loc"])
        origin = _origin(place.path, layers, of_rule=_is_rule(detail))
        if _is_rule(detail):
            # A rule's error tells several faults, one a line; each stays a fault of its own.
            for line in str(detail["ctx"]["error"]).splitlines():
                complaints[(origin, f"{_shown_key(place.key, origin)}{line}")] = [""]
            continue
        # Hints take a while, and no more faults than MAX_FAULTS are shown.
        if detail["type"] == "extra_forbidden" and not place.kinds and number < MAX_FAULTS:
            for path, advice in unknown_keys(root, place, detail["input"], layers):
                origin = _origin(path, layers, of_rule=False)
                what = f"unknown key; {advice}" if advice else "unknown key"
                complaints.setdefault((origin, _shown_key(dotted(path), origin)), []).append(what)
            continue
        what = _complaint(place, detail)
        complaints.setdefault((origin, _shown_key(place.key, origin)), []).append(what)
    return [f"{origin}: {key}{_joined(whats)}" for (origin, key), whats in complaints.items()]


def _written(root: Section, error: ValidationError, layers: Sequence[Layer]) -> list[ErrorDetails]:
    """The errors without those about values that a rule copied from keys which have errors themselves."""
    details = error.errors(include_url=False)
    paths = [locate(root, detail["loc"]).path for detail in details]
    are_written = [any(layer.holds(path) for layer in layers) for path in paths]
    found = [(path[-1:], _got(detail)) for path, detail, own in zip(paths, details, are_written, strict=True) if own]
    return [
        detail
        for path, detail, is_own in zip(paths, details, are_written, strict=True)
        if is_own or _is_rule(detail) or (path[-1:], _got(detail)) not in found
    ]


def locate(root: Section, loc: KeyPath) -> Place:
    """Find the key of a Pydantic location, which also contains the names of union members."""
    path: list[str | int] = []
    kinds: tuple[Any, ...] = (root,)
    variants: tuple[Section, ...] = (root,)
    tag = None
    field: FieldInfo | None = None
    for part in loc:
        sections = sections_among(kinds)
        chosen = [section for section in sections if len(sections) > 1 and tag_of(section) == part]
        items = list_items(kinds)
        if chosen:
            kinds, variants, tag = tuple(chosen), sections, str(part)
            continue
        if sections:
            if len(sections) == 1 and (tag is None or sections[0] not in variants):
                variants, tag = sections, None
            found = [match for section in sections if (match := find_field(section, str(part))) and match[0] == part]
            kinds = tuple(kind for _, match in found for kind in alternatives(match.annotation))
            field = found[0][1] if found else None
        elif items is not None and isinstance(part, int):
            kinds = items
        elif is_table(kinds) and str not in kinds:
            kinds = table_items(kinds) or ()
        else:
            break
        path.append(part)
    return Place(tuple(path), variants, tag, kinds, field)


def unknown_keys(root: Section, place: Place, value: Any, layers: Sequence[Layer]) -> list[tuple[KeyPath, str | None]]:
    """Return the keys to report for an unknown key with this value, and a hint for each.

    That is the key itself or, for a table of another version, each key in it that has a hint of its own.
    """
    if owners := variants_with(place.variants, str(place.path[-1])) if place.tag is not None else []:
        return [(place.path, _advice_for_variant(place, owners, layers))]
    paths: dict[str, list[KeyPath]] = {}
    for leaf, _ in leaves(value, place.path):
        paths.setdefault(advice_for_renamed(root, leaf) or "", []).append(leaf)
    if list(paths) == [""]:
        return [(place.path, advice_for_key(root, place.key))]
    named = []
    for advice, keys in paths.items():
        table = _common_start(keys)
        shared = any(leaf[: len(table)] == table for others in paths.values() if others != keys for leaf in others)
        named += [(path, advice or None) for path in (keys if shared else [table])]
    return named


def _common_start(paths: Sequence[KeyPath]) -> KeyPath:
    same = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return tuple(parts[0] for parts in same)


def _is_rule(detail: ErrorDetails) -> bool:
    return detail["type"] in ("value_error", "assertion_error")


def _complaint(place: Place, detail: ErrorDetails) -> str:
    match detail["type"]:
        case "extra_forbidden":
            return "is another name for a key that is also set: remove one of them" if place.kinds else "unknown key"
        case "missing":
            return "is required"
        case "union_tag_not_found":
            return f"its `type` is required: {_listed(_tags(place))}"
        case "union_tag_invalid":
            return f"its `type` should be {_listed(_tags(place))} (got {detail['ctx']['tag']!r})"
        case "literal_error":
            return f"should be {detail['ctx']['expected']}{_got(detail)}{_nearest_literal(place, detail)}"
        case "path_type":
            return f"should be a path{_got(detail)}"
        case kind if kind in _OUT_OF_RANGE and place.field is not None:
            return f"should be {range_text(place.field)}{_got(detail)}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"should be a table{_got(detail)}"
        case "list_type" if isinstance(detail["input"], str | int | float):
            return f"should be a list{_list_example(place, detail['input'])}{_got(detail)}"
        case kind if kind in _ONE_VALUE and isinstance(detail["input"], list):
            return f"should be {_one_value(place, kind)}{_got(detail)}{_each_item(place)}"
    return detail["msg"].removeprefix("Input ").split(", unable to")[0] + _got(detail)


def _one_value(place: Place, kind: str) -> str:
    bounds = "" if place.field is None else range_text(place.field, "")
    return ", ".join(filter(None, (f"one {_ONE_VALUE[kind]}", bounds)))


def _list_example(place: Place, value: Any) -> str:
    """How to write a list that the user wrote as one value."""
    items = list_items(place.kinds) or ()
    if sections_among(items):
        return f" of tables: write [[{place.key}]]"
    return f", such as {value_text([value])}" if type(value) in items else ""


def _each_item(place: Place) -> str:
    """Where a key may have several values, for a section whose list of tables has the key too."""
    for section in place.variants:
        for name, field in section.model_fields.items():
            items = sections_among(list_items(alternatives(field.annotation)) or ())
            if any(find_field(item, str(place.path[-1])) for item in items):
                inside = dotted((*place.path[:-1], name))
                return f"; set {place.path[-1]} in each [[{inside}]] to have one for each"
    return ""


def _advice_for_variant(place: Place, owners: Sequence[str], layers: Sequence[Layer]) -> str:
    tag = (*place.path[:-1], "type")
    chosen = next((f" (from {layer.origin(tag)})" for layer in reversed(layers) if layer.holds(tag)), "")
    union = ".".join(str(part) for part in place.path[:-1])
    return f"it belongs to {union}.type = {_listed(owners)}, but {union}.type is {place.tag!r}{chosen}"


def _tags(place: Place) -> list[str]:
    return [str(tag_of(section)) for section in sections_among(place.kinds)]


def _nearest_literal(place: Place, detail: ErrorDetails) -> str:
    choices = [str(choice) for choice in literals(place.kinds)]
    close = get_close_matches(str(detail["input"]), choices, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _got(detail: ErrorDetails) -> str:
    if "headers" in detail["loc"] or detail["type"] == "secret_in_uri":
        return ""  # their values may be secret
    try:
        value = repr(detail["input"])
    except ValueError:  # an integer of more digits than Python converts
        return ""
    return f" (got {value if len(value) <= 60 else value[:57] + '...'})"


def _listed(values: Sequence[str]) -> str:
    quoted = [repr(value) for value in values]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def _joined(complaints: Sequence[str]) -> str:
    """Join messages such as `should be a (got x)` and `should be b (got x)` into one."""
    unique = list(dict.fromkeys(complaints))
    if len(unique) == 1:
        return unique[0]
    got = {what[what.index(" (got ") :] for what in unique if " (got " in what}
    if len(got) != 1:
        return "; ".join(unique)
    suffix = got.pop()
    return " or ".join(what.removesuffix(suffix) for what in unique) + suffix


def _origin(path: KeyPath, layers: Sequence[Layer], of_rule: bool) -> str:
    """Return the strongest source of a key. For a rule about several keys, return all sources of its section."""
    for length in range(len(path), -1, -1):
        holders = [layer for layer in layers if layer.data and layer.holds(path[:length])]
        if holders and of_rule:
            return ", ".join(dict.fromkeys(layer.name for layer in holders))
        if holders:
            return holders[-1].origin(path[:length])
    return "config"


def _shown_key(key: str, origin: str) -> str:
    """Return the key and a colon, or nothing if the origin is the option for this key."""
    same = origin.startswith("--") and origin[2:].replace("-", "_").lower() in (key, f"no_{key}")
    return "" if same or not key else f"{key}: "
