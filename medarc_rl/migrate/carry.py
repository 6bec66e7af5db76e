"""Applies the engine's tables to settings: keep, rename, drop or refuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from medarc_rl.migrate.draft import Draft, Finding, Placed, names
from medarc_rl.migrate.values import key_text
from prime_rl.configs.surface.kinds import ROOTS
from prime_rl.configs.surface.meanings import DEFAULTS, DIFFERENT, SAME_HERE
from prime_rl.configs.surface.renamed import OLDER, SECTIONS_OF_RL, Renamed, find_renamed, split_component
from prime_rl.utils.pydantic_config.schema import find_key, has_key, is_nullable
from prime_rl.utils.pydantic_config.suggest import advice_for_key
from prime_rl.utils.tables import KeyPath


def carry_by_tables(draft: Draft) -> None:
    """Decide on every setting that is left."""
    root = ROOTS[draft.kind]
    for path, value in list(draft.left.items()):
        key = draft.qualified(path)
        same = next((each for each in SAME_HERE if each.applies(key, value, draft.versions)), None)
        different = next((each for each in DIFFERENT if each.applies(key, value, draft.versions)), None)
        if same is not None:
            draft.drop(path, same.why)
        elif different is not None:
            draft.refuse(path, different.why, different.instead)
        elif has_key(root, names(path)):
            draft.keep(path)
        else:
            _carry_renamed(draft, path, value)


def _carry_renamed(draft: Draft, path: KeyPath, value: Any) -> None:
    found = find_renamed(*split_component(draft.kind, ".".join(names(path))))
    if found is None:
        draft.refuse(path, "no known version has this key", advice_for_key(ROOTS[draft.kind], key_text(path)) or "")
        return
    entry, below = found
    if not entry.new:
        why = "it was removed" if entry in OLDER else "it is not supported"
        draft.refuse(path, why, "" if entry.note == "remove it" else entry.note)
    elif entry.value == "rewrite":
        draft.refuse(path, f"it became {_replacement(draft, path, entry)}, which works differently", entry.note)
    else:
        _move(draft, path, entry, len(below.split(".")) if below else 0)


def _move(draft: Draft, path: KeyPath, entry: Renamed, depth: int) -> None:
    """Move a setting that is `depth` names below the table that was renamed."""
    value = draft.left[path]
    if entry.value == "inverted" and not isinstance(value, bool):
        draft.refuse(path, "its value is not a boolean", "")
        return
    tail = path[_start_of_tail(path, depth) :]
    targets = {}
    for new in _replacements(draft, path, entry):
        table = draft.located(new)
        if table is None or not has_key(ROOTS[draft.kind], names((*table, *tail))):
            missing = f"{key_text((*table, *tail))} here" if table is not None else f"{new} in this config"
            draft.refuse(path, f"there is no {missing}", entry.note)
            return
        targets[_with_indices(path, table) + tail] = not value if entry.value == "inverted" else value
    if draft.move(path, targets):
        old = key_text(path[: len(path) - len(tail)])
        shown = " and ".join(key_text(target[: len(target) - len(tail)]) for target in targets)
        note = f" ({entry.note})" if entry.note else ""
        draft.findings.append(Finding("moved", f"{old} -> {shown}{note}", path))


def _start_of_tail(path: KeyPath, depth: int) -> int:
    start = len(path)
    while depth:
        start -= 1
        depth -= isinstance(path[start], str)
    return start


def _replacements(draft: Draft, path: KeyPath, entry: Renamed) -> list[str]:
    component = draft.qualified(path).partition(".")[0]
    return [new.replace("*", component, 1) for new in entry.new]


def _replacement(draft: Draft, path: KeyPath, entry: Renamed) -> str:
    paths = [draft.located(new) for new in _replacements(draft, path, entry)]
    return ", ".join(
        key_text(located) if located is not None else new
        for located, new in zip(paths, _replacements(draft, path, entry), strict=True)
    )


def _with_indices(path: KeyPath, table: KeyPath) -> KeyPath:
    """`table` with the indices that `path` has behind the same names."""
    indices = {names(path[:at]): path[at] for at in range(len(path)) if isinstance(path[at], int)}
    result: KeyPath = ()
    for name in table:
        result = (*result, name)
        if names(result) in indices:
            result = (*result, indices[names(result)])
    return result


def keep_sections(draft: Draft) -> None:
    """Keep a table whose presence has a meaning, even if nothing in it was carried: `[ckpt]` enables checkpoints."""
    tables = dict.fromkeys(path[:length] for path in draft.source for length in range(1, len(path)))
    for table in tables:
        found = find_renamed(*split_component(draft.kind, ".".join(names(table))))
        here = [table]
        if found is not None and found[0].value == "same" and not found[1]:
            here = [located for new in _replacements(draft, table, found[0]) if (located := draft.located(new))]
        for target in here:
            if _counts_if_empty(draft, target) and not draft.holds(target):
                draft.placed[target] = Placed({}, table)


def _counts_if_empty(draft: Draft, table: KeyPath) -> bool:
    """Whether this version has an optional section, or a component's, at `table`."""
    if any(isinstance(part, int) for part in table) or any(
        each.key == draft.qualified(table) and not each.values for each in DIFFERENT
    ):
        return False
    site = find_key(ROOTS[draft.kind], key_text(table))
    is_component = len(table) == 1 and table[0] in SECTIONS_OF_RL
    return site is not None and site.is_section and (is_nullable(site.kinds) or is_component)


def note_defaults(draft: Draft) -> None:
    """Note the defaults that differ, for keys that the new file leaves out."""
    for version in sorted(draft.versions):
        for default in DEFAULTS[version]:
            component, *key = default.key.split(".")
            path = draft.located(default.key)
            needs = draft.located(default.needs or component)
            if path is None or needs is None or not (needs == () or draft.holds(needs)):
                continue
            if not any(_has_run(names(each), key) for each in draft.placed):
                draft.note(f"default of {key_text(path)}: it was {default.theirs}; here it is {default.ours}")


def _has_run(names: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether `names` contains `wanted` in one piece. A shared key counts for its components, and the reverse."""
    return any(list(names[at : at + len(wanted)]) == list(wanted) for at in range(len(names)))
