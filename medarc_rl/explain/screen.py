"""Shows explained values as text: a table of several, everything about one, or the difference of two configs."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medarc_rl.explain.origins import Explained
from prime_rl.configs.surface.resuming import rule_for
from prime_rl.utils.pydantic_config import BaseSettings
from prime_rl.utils.pydantic_config.describe import bounds_text, default_text, field_doc, type_text, value_text
from prime_rl.utils.tables import KeyPath
from prime_rl.utils.terminal import shortened

MAX_KEY_CHARS, MAX_VALUE_CHARS = 52, 40

_ON_RESUME = {
    "applied": "a new value holds from the resumed step on",
    "refused": "refused",
    "none": "no effect on the training",
    "attempt": "not compared",
}
_READERS = {
    "trainer": "the trainer",
    "orchestrator": "the orchestrator",
    "inference": "the inference server",
    "teacher_inference": "the teacher's inference server",
    "eval": "the evaluator",
    "sft": "the trainer",
    "dpo": "the trainer",
    "rm": "the trainer",
}
_OF_THE_LAUNCH = frozenset(
    ("clean_output_dir", "deployment", "dry_run", "file_access", "slurm", "inference_gpu_ids", "trainer_gpu_ids")
)


def table(values: Sequence[Explained]) -> Iterator[str]:
    """One line for each value: key, value, origin. Files are listed above, and named by their last part below."""
    files = dict.fromkeys(place.rpartition(":")[0] for each in values for place in _places(each) if ":" in place)
    names = {file: Path(file).name for file in files}
    short = {file: name if list(names.values()).count(name) == 1 else file for file, name in names.items()}
    yield from (f"# {name}: {file}" for file, name in short.items() if name != file)
    keys = [each.key for each in values]
    shown = [shortened(value_text(each.value), MAX_VALUE_CHARS) for each in values]
    key_width = min(max(map(len, keys), default=0), MAX_KEY_CHARS)
    value_width = max(map(len, shown), default=0)
    for each, value in zip(values, shown, strict=True):
        over = "".join(f", over {value_text(lost.value)} from {_short(lost.place, short)}" for lost in each.overridden)
        yield f"{each.key:{key_width}}  {value:{value_width}}  {_short(each.origin, short)}{over}"


def _places(value: Explained) -> Iterator[str]:
    return (setting.place for setting in value.written)


def _short(place: str, names: Mapping[str, str]) -> str:
    file, colon, line = place.rpartition(":")
    return f"{names[file]}:{line}" if colon and file in names else place


def details(root: type[BaseSettings], value: Explained, copies: Sequence[Explained]) -> Iterator[str]:
    """Everything about one value. `copies` are the values that follow it."""
    field, name = value.section.model_fields[str(value.path[-1])], str(value.path[-1])
    yield f"{value.key} = {value_text(value.value)}"
    doc = " ".join(field_doc(value.section, name).split())
    width = min(shutil.get_terminal_size().columns, 100) - 2
    yield from (f"  {line}" for line in textwrap.wrap(doc, width, break_on_hyphens=False))
    limits = ", ".join(filter(None, (type_text(field.annotation), bounds_text(field))))
    rows = [("type", limits), ("default", default_text(field))]
    rows.append(("origin", value.origin))
    rows += [("overrides", f"{value_text(lost.value)}  {lost.place}") for lost in value.overridden]
    rows += [("also sets", f"{copy.key} = {value_text(copy.value)}") for copy in copies]
    rows.append(("read by", reader_of(root.component, value.path)))
    if root.component != "eval":
        rule = rule_for(*_component_key(root.component, value.path))
        why = f": {rule.why}" if rule.why else ""
        rows.append(("if changed on resume", _ON_RESUME[rule.effect] + why))
    title_width = max(len(title) for title, _ in rows)
    yield from (f"  {title:{title_width}}  {text}" for title, text in rows)


def reader_of(component: str, path: KeyPath) -> str:
    """The process that reads a key of a root config."""
    first = str(path[0])
    if first in _OF_THE_LAUNCH:
        return "the launcher"
    if component == "rl":
        return _READERS.get(first, "the launcher, for every component that it concerns")
    return _READERS["inference"] if first == "inference" else _READERS[component]


def _component_key(component: str, path: KeyPath) -> tuple[str, str]:
    """Component and key as in the table of rules for resuming, where items of lists have no index."""
    names = [part for part in path if isinstance(part, str)]
    if component == "rl" and names[0] in ("trainer", "orchestrator", "inference"):
        return names[0], ".".join(names[1:])
    return component, ".".join(names)


def as_json(values: Iterable[Explained]) -> dict[str, Any]:
    """What `--json` prints: each key with value, origin and what it overrides."""
    return {
        each.key: {
            "value": _plain(each.value),
            "origin": each.origin,
            "overrides": [{"value": _plain(lost.value), "origin": lost.place} for lost in each.overridden],
        }
        for each in values
    }


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else str(value)


# The difference of two configs.


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose value differs. `mine` or `other` is None if its config lacks the key."""

    key: str
    mine: Explained | None
    other: Explained | None

    def as_json(self) -> list[Any]:
        return [None if side is None else as_json([side])[side.key] for side in (self.mine, self.other)]


def differences(mine: Sequence[Explained], other: Sequence[Explained]) -> list[Difference]:
    """The keys that differ, in the order of the first config. Paths are compared as they are written."""
    others = {each.key: each for each in other}
    mines = {each.key: each for each in mine}
    keys = dict.fromkeys([*mines, *others])
    pairs = [Difference(key, mines.get(key), others.get(key)) for key in keys]
    return [each for each in pairs if each.mine is None or each.other is None or each.mine.value != each.other.value]


def difference_lines(found: Sequence[Difference], mine: str, other: str) -> Iterator[str]:
    """A line for the key, and one for each side."""
    if not found:
        yield f"{mine} and {other} have the same values"
    width = max(len(mine), len(other))
    for each in found:
        # The keys of a section that only one side has are listed themselves.
        is_section = any(one.key.startswith(f"{each.key}.") for one in found)
        yield each.key
        for name, side in ((mine, each.mine), (other, each.other)):
            if side is not None:
                shown = f"{shortened(value_text(side.value), MAX_VALUE_CHARS)}  ({side.origin})"
            else:
                shown = "a section" if is_section else "not there"
            yield f"  {name:{width}}  {shown}"
