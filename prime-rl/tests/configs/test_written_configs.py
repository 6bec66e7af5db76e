"""A config that a launcher writes is read back as the same config by the process that gets it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from prime_rl.configs.data import SFTDataConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.surface.root import ROOTS, RootConfig
from prime_rl.launch.plan import component_configs
from prime_rl.run.directory import write_configs
from prime_rl.run.paths import RunPaths
from prime_rl.utils.pydantic_config import ConfigError, load_config
from prime_rl.utils.pydantic_config.schema import (
    NAMED,
    Section,
    alternatives,
    list_items,
    sections_among,
    table_items,
    tag_of,
)

ENVIRONMENT = {"id": "reverse-text"}
ORCHESTRATOR = {"env": [ENVIRONMENT], "rollouts_per_example": 4, "batch_size": 8, "max_steps": 40}
IMITATING = {"demonstrations": {"data": {"name": "rows.jsonl", "batch_size": 16}}}
NEEDED: dict[str, list[dict[str, Any]]] = {
    "rl": [
        {
            "trainer": {"critic": {}},
            "orchestrator": {**ORCHESTRATOR, "max_steps": None},
            "max_steps": 40,
            "algorithm": "ppo",
        },
        {"trainer": IMITATING, "orchestrator": ORCHESTRATOR, "max_steps": 40, "ckpt": {}, "wandb": {}, "slurm": {}},
    ],
    "sft": [{"max_steps": 40}, {"max_steps": 40, "eval": {"env": [ENVIRONMENT]}, "slurm": {}}],
    "dpo": [{"max_steps": 40, "loss": {"beta": 0.2}}],
    "rm": [{"max_steps": 40, "loss": {"center_rewards_coefficient": 0.01}}],
    "eval": [{"env": [ENVIRONMENT]}],
    "orchestrator": [ORCHESTRATOR],
    "trainer": [{"max_steps": 40, **IMITATING}],
    "inference": [{}],
}
"""Valid configs of each root, to which parts are added one by one."""
LAUNCH_KEYS = {"slurm", "dry_run", "clean_output_dir"}
"""Keys that concern the launch alone, and are not written."""
VALUES: dict[Any, Any] = {str: "math.isclose", int: 2, float: 0.5, bool: True, Path: "x"}
Part = tuple[tuple[str, ...], Any]


def value_of(kinds: tuple[Any, ...]) -> Any:
    """A value of a required key."""
    for kind in kinds:
        if kind in VALUES:
            return VALUES[kind]
        if get_origin(kind) is Literal:
            return get_args(kind)[0]
        if get_origin(kind) is list:
            return [value_of(alternatives(get_args(kind)[0]))]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return table_of(kind)
    return "x"


def table_of(section: Section) -> dict[str, Any]:
    """The smallest table of a section."""
    tag = tag_of(section)
    required = {
        name: value_of(alternatives(field.annotation))
        for name, field in section.model_fields.items()
        if field.is_required()
    }
    return required | ({"type": tag} if isinstance(tag, str) else {})


def parts_of(section: Section, path: tuple[str, ...] = ()) -> Iterator[Part]:
    """Every optional section, variant of a union, list and table of sections below a section, with a value."""
    for name, field in section.model_fields.items():
        kinds = alternatives(field.annotation)
        here = (*path, name)
        for child in sections_among(kinds):
            yield here, table_of(child)
            yield from parts_of(child, here)
        for item in sections_among(list_items(kinds) or ()):
            yield here, [table_of(item)]
        for item in sections_among(table_items(kinds) or ()):
            yield (*here, NAMED.lower()), table_of(item)


def with_part(root: Section, table: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The table with one part. Sections on the way get the variant that has the rest of the path."""
    name, *rest = path
    if not rest:
        old = table.get(name)
        return table | {name: old | value if isinstance(old, dict) and isinstance(value, dict) else value}
    kinds = alternatives(root.model_fields[name].annotation) if name in root.model_fields else ()
    if table_items(kinds):
        return table | {name: {rest[0]: value}}
    child = next(each for each in sections_among(kinds) if rest[0] in each.model_fields)
    inside = table.get(name) if isinstance(table.get(name), dict) else {}
    return table | {name: with_part(child, table_of(child) | (inside or {}), tuple(rest), value)}


def read_back(component: str, config: RootConfig, paths: RunPaths) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a launcher holds, and what the process reads from the file."""
    write_configs(paths, {component: config})
    read = load_config(type(config), [paths.config(component)])
    return config.model_dump(exclude=LAUNCH_KEYS), read.model_dump(exclude=LAUNCH_KEYS)


@pytest.mark.parametrize("component", sorted(ROOTS))
def test_every_part_of_a_config_survives_being_written_and_read(component: str, tmp_path: Path) -> None:
    root, paths = ROOTS[component], RunPaths(tmp_path)
    tried = refused = 0
    for base, (path, value) in product(NEEDED[component], [(("toml_files",), None), *parts_of(root)]):
        try:
            config = load_config(root, overrides=with_part(root, base, path, value))
        except ConfigError:
            refused += 1  # the part needs another one
            continue
        tried += 1
        configs = component_configs(config) if isinstance(config, RLConfig) else {component: config}
        for name, written in configs.items():
            held, read = read_back(name, written, paths)
            assert read == held, (name, path, value)
    assert tried > 2 * refused


def test_the_default_dataset_beside_sources_is_not_a_second_choice(tmp_path: Path) -> None:
    sources = [{"name": "a.jsonl"}, {"name": "b.jsonl", "weight": 3}]
    for name in ("mine", SFTDataConfig().name):
        values = {"data": {"name": name, "sources": sources}}
        if name == "mine":
            with pytest.raises(ConfigError, match="sources and name are both set"):
                load_config(SFTConfig, overrides=values)
        else:
            assert len(load_config(SFTConfig, overrides=values).data.sources or ()) == 2
