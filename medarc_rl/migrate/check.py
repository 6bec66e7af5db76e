"""Loads the new settings with this version's config classes, and takes out what they refuse."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails

from medarc_rl.migrate.draft import Draft, Finding
from prime_rl.configs.surface.kinds import ROOTS
from prime_rl.configs.surface.not_built import NOT_BUILT, NotBuilt, unbuilt_faults
from prime_rl.utils.pydantic_config import BaseSettings, ConfigError, ConfigWarning
from prime_rl.utils.pydantic_config.base import with_nulls
from prime_rl.utils.pydantic_config.faults import faults_of, locate
from prime_rl.utils.pydantic_config.layers import Layer, merge_layers, with_underscores
from prime_rl.utils.pydantic_config.schema import walk_fields
from prime_rl.utils.pydantic_config.toml_files import BASES_KEY, read_files
from prime_rl.utils.tables import KeyPath

WHY_NOT_BUILT = "not supported yet"


def check(draft: Draft, file: Path) -> None:
    """Refuse what this version cannot use. Faults that remain become findings.

    `toml_files` are read from the directory of `file`.
    """
    for target, entry in list(_not_built(draft)):
        if target in draft.placed:
            draft.refuse(draft.take_back(target), WHY_NOT_BUILT, entry.why)
    try:
        _take_out_misfits(draft, file, _bases(draft, file))
    except ConfigError as error:
        draft.findings += [Finding("fault", fault) for fault in error.faults]


def _take_out_misfits(draft: Draft, file: Path, bases: list[Layer]) -> None:
    root = ROOTS[draft.kind]
    while True:
        own = Layer(str(file), {key: value for key, value in draft.data.items() if key != BASES_KEY})
        layers = [with_underscores(root, layer) for layer in (*bases, own)]
        try:
            draft.findings += _not_built_after_all(_load(root, layers))
            return
        except ValidationError as error:
            misfits = list(_misfits(draft, error))
            if not misfits:
                raise ConfigError(faults_of(root, error, layers)) from None
        for target, fault in misfits:
            if target in draft.placed:
                draft.refuse(draft.take_back(target), fault, "")


def _bases(draft: Draft, file: Path) -> list[Layer]:
    named = draft.placed.get((BASES_KEY,))
    if named is None or not isinstance(named.value, list):
        return []
    draft.note(f"{BASES_KEY}: migrate these files too; in this version, a file's own keys override theirs")
    return read_files(file.parent / str(name) for name in named.value).layers


def _load(root: type[BaseSettings], layers: list[Layer]) -> BaseSettings:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return root.model_validate(merge_layers(root, layers))


def _misfits(draft: Draft, error: ValidationError) -> Iterator[tuple[KeyPath, str]]:
    """Settings that the classes do not know, and moved settings whose value does not fit; with the reason."""
    root = ROOTS[draft.kind]
    for detail in error.errors(include_url=False):
        path = locate(root, detail["loc"]).path
        moved = path in draft.placed and draft.placed[path].origin != path
        targets = [target for target in draft.placed if target[: len(path)] == path]
        if moved or detail["type"] == "extra_forbidden":
            fault = _fault(root, detail, draft.data)
            yield from ((target, fault) for target in targets)


def _fault(root: type[BaseSettings], detail: ErrorDetails, data: dict[str, Any]) -> str:
    """One validation error in words, without the file's name."""
    single = InitErrorDetails(type=detail["type"], loc=detail["loc"], input=detail["input"])
    if "ctx" in detail:
        single["ctx"] = detail["ctx"]
    error = ValidationError.from_exception_data(root.__name__, [single])
    return faults_of(root, error, [Layer("", data)])[0].removeprefix(": ")


def _not_built(draft: Draft) -> Iterator[tuple[KeyPath, NotBuilt]]:
    """Settings that load but are not implemented."""
    defaults: dict[str, list[Any]] = {}
    for path, _, field in walk_fields(ROOTS[draft.kind]):
        if not field.is_required():
            defaults.setdefault(draft.qualified(path), []).append(field.get_default(call_default_factory=True))
    for entry in NOT_BUILT:
        for target, placed in draft.placed.items():
            key = draft.qualified(target)
            value = with_nulls(placed.value)
            is_default = key == entry.key and value in defaults.get(key, ())
            if (key == entry.key or key.startswith(f"{entry.key}.")) and (
                value in entry.values if entry.values else not is_default
            ):
                # The other keys of a variant have no meaning without its `type`.
                table = target[:-1] if target[-1] == "type" else target
                yield from ((each, entry) for each in draft.placed if each[: len(table)] == table)


def _not_built_after_all(config: BaseSettings) -> Iterator[Finding]:
    """Unimplemented settings that come from `toml_files` or are derived from others."""
    return (Finding("fault", fault) for fault in unbuilt_faults(config))
