"""Config values of runs: those that were set and where, and those that differ between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from medarc_rl.errors import UsageError
from medarc_rl.explain.differences import differences
from medarc_rl.explain.origins import Explained, Setting
from medarc_rl.explain.record import NAME as ORIGINS
from medarc_rl.explain.screen import shortened
from medarc_rl.explain.sources import Source
from medarc_rl.report.charts import Section, Table
from medarc_rl.report.groups import Group
from prime_rl.history.run import RunHistory
from prime_rl.utils.pydantic_config import ConfigError
from prime_rl.utils.pydantic_config.describe import value_text
from prime_rl.utils.tables import leaves

MAX_VALUE_CHARS = 200
_FOLLOWS = "follows:"
_OWN_PATHS = ("output_dir",)
"""Keys that differ in every run and explain nothing."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The values of a run's config."""

    run: RunHistory
    values: Sequence[Explained]
    notable: Sequence[Explained]
    """Those that are not defaults."""
    fault: str = ""
    """Why this version cannot load the config; the values are then those of the files, without defaults' names."""


def config_of(run: RunHistory) -> RunConfig:
    """The values with their origins. A config that this version cannot load is read as plain TOML."""
    is_recorded = (run.paths.configs / ORIGINS).exists()
    try:
        values = list(Source.of_run(run.paths.root).values)
        return RunConfig(run, values, [each for each in values if _is_notable(each, is_recorded)])
    except (UsageError, ConfigError) as error:
        return plain_config(run, "; ".join(error.faults))
    except (OSError, ValueError) as error:
        return plain_config(run, " ".join(str(error).split()))


def _is_notable(value: Explained, is_recorded: bool) -> bool:
    """Without recorded origins, every value comes from the resolved config; only those that are no defaults count."""
    if is_recorded:
        return value.is_of_interest
    return bool(value.value != value.section.model_fields[str(value.path[-1])].get_default(call_default_factory=True))


def plain_config(run: RunHistory, fault: str = "") -> RunConfig:
    """The values as they are in the file, with the recorded origins."""
    origins = _origins(run)
    values = []
    for path, written_value in leaves(run.config()):
        value = None if written_value == "None" else written_value
        origin = origins.get(".".join(map(str, path)))
        written = () if origin is None else (Setting(value, origin),)
        values.append(Explained(path, value, BaseModel, written, None))
    return RunConfig(run, values, [each for each in values if each.written], fault)


def _origins(run: RunHistory) -> dict[str, str]:
    try:
        record = json.loads((run.paths.configs / ORIGINS).read_bytes())
        return {str(key): str(entry["origin"]) for key, entry in record.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def settings_section(run: RunHistory) -> Section:
    """Values of one run that were set, and where; folded, those that follow from them."""
    section = Section("settings", "What ran")
    config = config_of(run)
    if config.fault:
        section.warnings.append(f"This version cannot load the config: {config.fault}")
    if not config.values:
        section.notes.append("The config cannot be read.")
        return section
    chosen = [each for each in config.notable if not each.origin.startswith(_FOLLOWS)]
    rows = [(each.key, _shown(each.value), each.origin) for each in chosen]
    caption = "Config values that were set, and where"
    section.tables.append(Table(("key", "value", "set by"), rows, caption, is_numeric=False))
    # Copies of a shared key say nothing new.
    if rest := [each for each in config.notable if each.origin.startswith(_FOLLOWS)]:
        lines = "\n".join(f"{each.key} = {_shown(each.value)}    # {each.origin}" for each in rest)
        section.listings.append((f"{len(rest)} values that follow from others", lines))
    return section


def differing_keys(groups: Sequence[Group]) -> Section:
    """The config keys whose values differ between the runs."""
    section = Section("differences", "What differs")
    configs = [config_of(run) for group in groups for run in group.runs]
    if faults := [
        f"{each.run.name}: this version cannot load the config: {each.fault}" for each in configs if each.fault
    ]:
        section.notes += faults
        # Defaults that a file leaves out would count as differences from one that was loaded.
        configs = [plain_config(each.run) for each in configs]
    keys: dict[str, None] = {}
    for other in configs[1:]:
        keys |= dict.fromkeys(each.key for each in differences(configs[0].values, other.values))
    by_run = [{each.key: each for each in config.values} for config in configs]
    rows = [
        (key, *(_shown(found[key].value) if key in found else "not there" for found in by_run))
        for key in keys
        if key.rpartition(".")[2] not in _OWN_PATHS and _is_no_copy(key, by_run)
    ]
    if rows:
        headers = ("key", *(_column(config.run, groups) for config in configs))
        section.tables.append(Table(headers, rows, "Config keys with different values", is_numeric=False))
    else:
        section.notes.append("The configs have the same values, apart from the output directory.")
    return section


def _is_no_copy(key: str, by_run: Sequence[Mapping[str, Explained]]) -> bool:
    """False for a copy of a shared key, in every run that has it."""
    return not all(found[key].origin.startswith(_FOLLOWS) for found in by_run if key in found)


def _column(run: RunHistory, groups: Sequence[Group]) -> str:
    label = next(group.label for group in groups if run in group.runs)
    return label if label.endswith(run.name) else f"{label}: {run.name}"


def _shown(value: Any) -> str:
    return shortened(value_text(value), MAX_VALUE_CHARS)
