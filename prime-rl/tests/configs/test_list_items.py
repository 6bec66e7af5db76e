"""Options and variables for one item of a list of tables: `--orchestrator.env.0.id x`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.configs.surface.docs import ROOTS
from prime_rl.configs.surface.root import RootConfig
from prime_rl.utils.pydantic_config import load_config
from prime_rl.utils.pydantic_config.schema import (
    alternatives,
    find_key,
    is_boolean_flag,
    list_items,
    sections_among,
    walk_fields,
)

LISTS = [
    (root, ".".join(path))
    for root in ROOTS
    for path, _, field in walk_fields(root)
    if sections_among(list_items(alternatives(field.annotation)) or ())
]
TWO = '[[orchestrator.env]]\nid = "a"\nargs = {x = 1}\n[[orchestrator.env]]\nid = "b"\n'


@pytest.fixture
def envs(toml: Callable[..., Path]) -> Callable[..., list[tuple[str, dict]]]:
    """Ids and arguments of the environments of a file with two, changed by options."""

    def load(*options: str) -> list[tuple[str, dict]]:
        return [(env.id, env.args) for env in load_config(RLConfig, [toml(TWO)], options).orchestrator.env]

    return load


def test_an_option_changes_one_key_of_one_item(envs) -> None:
    assert envs("--orchestrator.env.0.id", "c") == [("c", {"x": 1}), ("b", {})]
    assert envs("--orchestrator.env.1.args", "y=2") == [("a", {"x": 1}), ("b", {"y": 2})]


def test_a_table_for_an_item_is_merged_into_it(envs) -> None:
    assert envs("--orchestrator.env.0", '{"id": "c"}') == [("c", {"x": 1}), ("b", {})]
    assert envs("--orchestrator.env.0.args", '{"y": 2}') == [("a", {"x": 1, "y": 2}), ("b", {})]


def test_the_next_index_appends_an_item(envs) -> None:
    assert envs("--orchestrator.env.2.id", "c")[2:] == [("c", {})]
    assert envs("--orchestrator.env.3.id", "d", "--orchestrator.env.2.id", "c")[2:] == [("c", {}), ("d", {})]


def test_dashes_and_underscores_are_equivalent(envs) -> None:
    for name in ("extra-env-kwargs", "extra_env_kwargs"):
        envs(f"--orchestrator.env.1.{name}", '{"a": 1}')
    options = ["--orchestrator.eval.env.0.num-examples", "7", "--orchestrator.eval.env.0.max_retries=2"]
    (env,) = load_config(RLConfig, [], options).orchestrator.eval.env
    assert (env.num_examples, env.max_retries) == (7, 2)


def test_an_item_of_a_default_list_keeps_its_other_keys() -> None:
    filters = load_config(RLConfig, [], ["--orchestrator.filters.1.window", "9"]).orchestrator.filters
    assert [each.type for each in filters] == ["gibberish", "repetition"]
    assert filters[1].window == 9


def test_items_follow_the_list_that_other_options_give(envs) -> None:
    given = ["--orchestrator.env", '{"id": "c"}', "--orchestrator.env.0.args", "z=3", "--orchestrator.env.1.id", "d"]
    assert envs(*given) == [("c", {"z": 3}), ("d", {})]


def test_a_variable_may_name_an_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_RL_ORCHESTRATOR__ENV__0__ID", "c")
    (env,) = load_config(RLConfig).orchestrator.env
    assert env.id == "c"


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (
            ["--orchestrator.env.5.id", "c"],
            "--orchestrator.env.5.id: orchestrator.env has 2 items, so the next index is 2 (got 5)",
        ),
        (
            ["--orchestrator.env", '{"id": "c"}', "--orchestrator.env.2.id", "d"],
            "--orchestrator.env.2.id: orchestrator.env has 1 item, so the next index is 1 (got 2)",
        ),
        (
            ["--orchestrator.env.0.idd", "c"],
            "--orchestrator.env.0.idd: unknown option; did you mean --orchestrator.env.0.id?",
        ),
        (
            ["--orchestrator.env.id", "c"],
            "--orchestrator.env.id: unknown option; did you mean --orchestrator.env.0.id?",
        ),
        (
            ["--env.0.id", "c"],
            "--env.0.id: unknown option; did you mean --orchestrator.env.0.id or --orchestrator.eval.env.0.id?",
        ),
        (["--orchestrator.env.-1.id", "c"], "--orchestrator.env.-1.id: unknown option"),
        (["--orchestrator.env.0.id"], "--orchestrator.env.0.id: needs a value"),
        (
            ["--orchestrator.eval.env.0.num-examples", "x"],
            "--orchestrator.eval.env.0.num-examples: should be a valid integer (got 'x')",
        ),
        (
            ["--orchestrator.client.base-url.0", "http://a"],
            "--orchestrator.client.base-url.0: unknown option; the items of a list are given together: "
            "--orchestrator.client.base-url a,b",
        ),
    ],
)
def test_a_wrong_item_is_one_line(toml, faults, options: list[str], fault: str) -> None:
    assert faults(RLConfig, *options, files=(toml(TWO),)) == [fault]


@pytest.mark.parametrize(("root", "key"), LISTS, ids=lambda value: getattr(value, "component", value))
def test_the_items_of_every_list_of_tables_have_options(root: type[RootConfig], key: str) -> None:
    site = find_key(root, f"{key}.0")
    assert site is not None
    assert site.path == (*key.split("."), 0)
    for section in sections_among(site.kinds):
        for path, _, _ in walk_fields(section):
            assert find_key(root, ".".join((key, "3", *path))) is not None


def test_a_flag_of_an_item_needs_no_value() -> None:
    assert is_boolean_flag(RLConfig, "--orchestrator.filters.0.enforce")
    filters = load_config(RLConfig, [], ["--orchestrator.filters.0.enforce"]).orchestrator.filters
    assert filters[0].enforce
