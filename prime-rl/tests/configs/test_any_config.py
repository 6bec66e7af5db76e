"""Whatever a file, an option or a variable says: a config that survives being written and read, or one line per fault.

`pytest prime-rl/tests -k test_any_ --hypothesis-profile campaign --timeout 0` tries 10,000 cases of each test.
"""

from __future__ import annotations

import json
import os
import string
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from prime_rl.checks import start_faults
from prime_rl.configs.surface.docs import ROOTS
from prime_rl.configs.surface.not_built import unbuilt_faults
from prime_rl.utils.errors import MAX_FAULTS
from prime_rl.utils.pydantic_config import ConfigError, load_config, parse_argv, to_toml
from prime_rl.utils.pydantic_config.schema import Section, alternatives, list_items, sections_among, walk_fields

CANARY = "canary"
EXPANSIONS = (
    f"$(touch {CANARY})",
    f"`touch {CANARY}`",
    f"; touch {CANARY}",
    f"{{{{ self.__init__.__globals__.os.system('touch {CANARY}') }}}}",
    "$HOME/${HOME}",
    "~/x",
    "%(output_dir)s %s %d",
    "{model.name}",
    "a\nb",
    "-x",
    "--model.name",
    "../../../etc",
    "*",
)
TEXTS = st.one_of(
    st.sampled_from(EXPANSIONS),
    st.sampled_from(
        ["", " ", "None", "null", "true", "inf", "nan", "1e309", "[]", "{}", "[1,2", '{"a":', "a=b", "x" * 5000]
    ),
    st.text(max_size=20),
    st.text(alphabet=string.printable, max_size=20),
)
INTEGERS = st.one_of(st.integers(-2, 300), st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400]))
FLOATS = st.one_of(st.floats(0, 1), st.floats(), st.sampled_from([1e308, 5e-324, -0.0]))
LEAVES = st.one_of(st.booleans(), INTEGERS, FLOATS, TEXTS, st.dates(), st.datetimes(), st.times())
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)


def keys_of(root: Section) -> list[tuple[tuple[str, ...], tuple[Any, ...]]]:
    """Path and kinds of every key of a root."""
    return [(path, alternatives(field.annotation)) for path, _, field in walk_fields(root)]


def fitting(kinds: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """Values of one of the kinds of a key."""
    found: list[st.SearchStrategy[Any]] = []
    for kind in kinds:
        if kind is bool:
            found.append(st.booleans())
        elif kind is int:
            found.append(INTEGERS)
        elif kind is float:
            found.append(st.one_of(FLOATS, INTEGERS))
        elif kind in (str, Path):
            found.append(TEXTS)
        elif getattr(kind, "__origin__", None) is dict:
            found.append(st.dictionaries(TEXTS, VALUES, max_size=3))
        elif hasattr(kind, "__args__") and getattr(kind, "__origin__", None) is not list:
            found.append(st.sampled_from(kind.__args__))
    items = list_items(kinds)
    if items is not None and not sections_among(items):
        found.append(st.lists(fitting(items), max_size=3))
    return st.one_of(*found) if found else VALUES


def nested(pairs: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """A table with these values. A later one replaces what is in its way."""
    table: dict[str, Any] = {}
    for path, value in pairs:
        place = table
        for part in path[:-1]:
            below = place.setdefault(part, {})
            if not isinstance(below, dict):
                below = place[part] = {}
            place = below
        place[path[-1]] = value
    return table


def assignments(root: Section) -> st.SearchStrategy[list[tuple[tuple[str, ...], Any]]]:
    """Some keys of a root with values that fit their types, and some with any value."""

    def valued(key: tuple[tuple[str, ...], tuple[Any, ...]]) -> st.SearchStrategy[tuple[tuple[str, ...], Any]]:
        path, kinds = key
        return st.tuples(st.just(path), st.one_of(fitting(kinds), fitting(kinds), VALUES))

    return st.lists(st.sampled_from(keys_of(root)).flatmap(valued), max_size=6)


def files(root: Section) -> st.SearchStrategy[bytes]:
    """Files for a root: sensible ones, sensible ones with a few bytes changed, TOML of other keys, and any bytes."""
    sensible = assignments(root).map(nested).map(_dumped)
    cut = st.tuples(sensible, st.integers(0, 200), st.binary(max_size=3)).map(
        lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] :]
    )
    others = st.dictionaries(TEXTS, VALUES, max_size=4).map(_dumped)
    return st.one_of(sensible, sensible, cut, others, st.binary(max_size=60))


def _dumped(table: Mapping[str, Any]) -> bytes:
    return tomli_w.dumps(table).encode(errors="surrogatepass")


def words(root: Section) -> st.SearchStrategy[list[str]]:
    """Command lines for a root."""
    flags = st.one_of(
        st.sampled_from([".".join(path) for path, _ in keys_of(root)]).map(lambda key: f"--{key}"),
        st.sampled_from([".".join(path) for path, _ in keys_of(root)]).map(lambda key: f"--no-{key}"),
        st.sampled_from([".".join(path) for path, _ in keys_of(root)]).map(lambda key: f"--{key}=1"),
        TEXTS.map(lambda text: f"--{text}"),
        st.sampled_from(["@", "@x", "--", "-", "--.", "--a.", "--.0", "--env.0.id", "--orchestrator.env.1.args.x"]),
    )
    values = st.one_of(TEXTS, LEAVES.map(str), VALUES.map(_as_json))
    return st.lists(st.one_of(flags, values, st.tuples(flags, values).map("=".join)), max_size=6).map(_without_nul)


def _as_json(value: Any) -> str:
    return json.dumps(value, default=str)


def _without_nul(args: list[str]) -> list[str]:
    """Words as a shell can pass them."""
    return [
        os.fsdecode(
            os.fsencode(word.replace("\0", "").encode("utf-8", "surrogateescape" if _is_escaped(word) else "replace"))
        )
        for word in args
    ]


def _is_escaped(word: str) -> bool:
    return all(not "\ud800" <= char <= "\udfff" or "\udc80" <= char <= "\udcff" for char in word)


def check_faults(faults: list[str]) -> None:
    """Each fault is one short line without control characters."""
    assert faults
    assert len(faults) <= MAX_FAULTS + 1
    for fault in faults:
        assert fault.strip()
        assert fault.isprintable()
        assert len(fault) <= 2100
        assert fault.count(" (got ") <= 1, "the value is told once"


def check_config(root: Section, load: Callable[[], BaseModel], directory: Path) -> BaseModel | None:
    """The config that `load` returns, after everything that a command does with it before it starts anything."""
    try:
        config = load()
    except ConfigError as error:
        check_faults(error.faults)
        return None
    unbuilt_faults(config)
    start_faults(config)
    written = to_toml(config, exclude=("toml_files",))
    file = directory / "written.toml"
    file.write_text(written, encoding="utf-8")
    assert to_toml(load_config(root, [file]), exclude=("toml_files",)) == written
    return config


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """The current directory, in which nothing may appear that the test does not write."""
    return tmp_path


def value_at(config: BaseModel, path: tuple[str, ...]) -> Any:
    value: Any = config
    for part in path:
        value = getattr(value, part, None)
    return value


by_root = pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.component)
of_one_root = settings(max_examples=settings().max_examples // len(ROOTS))
LimitedTime = Callable[[], AbstractContextManager[None]]


@by_root
def test_any_file_gives_a_config_or_lines(root: Section, empty: Path, limited_time: LimitedTime) -> None:
    @of_one_root
    @given(files(root))
    def loads(content: bytes) -> None:
        path = empty / "any.toml"
        path.write_bytes(content)
        with limited_time():
            check_config(root, lambda: load_config(root, [path]), empty)

    loads()
    assert not (empty / CANARY).exists()


@by_root
def test_any_command_line_gives_a_config_or_lines(root: Section, empty: Path, limited_time: LimitedTime) -> None:
    (empty / "x").write_text("max_steps = 3\n")

    @of_one_root
    @given(words(root))
    def loads(args: list[str]) -> None:
        with limited_time():
            check_config(
                root, lambda: parse_argv(root, argv=[word for word in args if word not in ("-h", "--help")]), empty
            )

    loads()
    assert not (empty / CANARY).exists()


@by_root
def test_any_variables_give_a_config_or_lines(root: Section, empty: Path, limited_time: LimitedTime) -> None:
    names = [f"PRIME_RL_{'__'.join(path)}".upper() for path, _ in keys_of(root)]
    values = st.one_of(TEXTS, VALUES.map(_as_json)).map(lambda text: _without_nul([text])[0])

    @of_one_root
    @given(st.dictionaries(st.one_of(st.sampled_from(names), st.just("PRIME_RL_A__B")), values, max_size=4))
    def loads(variables: dict[str, str]) -> None:
        with limited_time(), patch.dict(os.environ, variables):
            try:
                config = parse_argv(root, argv=[])
            except ConfigError as error:
                check_faults(error.faults)
                return
            start_faults(config)

    loads()
    assert not (empty / CANARY).exists()


@by_root
def test_what_is_typed_stays_as_it_is_typed(root: Section) -> None:
    texts = [path for path, kinds in keys_of(root) if str in kinds and not list_items(kinds)]
    needed = ["--environment-ids=x"] if "environment_ids" in root.model_fields else []
    untouched = load_config(root, overrides=needed)

    @of_one_root
    @given(st.sampled_from(texts), st.one_of(st.sampled_from(EXPANSIONS), st.text(max_size=20)))
    def stays(path: tuple[str, ...], text: str) -> None:
        text = _without_nul([text])[0]
        try:
            config = load_config(root, overrides=[*needed, f"--{'.'.join(path)}={text}"])
        except ConfigError:
            return
        # A shared setting may replace it, with a warning.
        shared = value_at(untouched, path)
        assert value_at(config, path) in (text, shared, None if text in ("None", "null") else text)

    stays()
