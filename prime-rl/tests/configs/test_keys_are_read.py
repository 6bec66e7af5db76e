"""Every key does something: code reads it, or it stands in `NOT_BUILT`, and setting it is refused or warned of.

What counts as reading a key:

- mypy says which class an expression has, so `ckpt.interval` counts for the class of `ckpt` at that place: the trainer
  and the orchestrator have a `CheckpointConfig` each.
- The module must be one that the command imports, at any depth and inside functions too. What only SFT reads of a
  section that the RL trainer has as well does not count for the RL trainer.
- Rules do not count: a key that is only compared with another one does nothing. Of the config classes' own code, a
  validator counts if it derives values, a property or function if something outside uses it, and so does what `rl`
  hands to its components.
- A read through a protocol counts for the config classes that have all of the protocol's members.

Two keys that have the same class in one root (`data` and `val.data` of SFT) are not told apart.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from prime_rl.configs.surface.docs import ROOTS
from prime_rl.configs.surface.not_built import NOT_BUILT
from prime_rl.configs.surface.root import RootConfig
from prime_rl.utils.pydantic_config.schema import alternatives, list_items, sections_among, table_items, tag_of

pytestmark = pytest.mark.slow

Section = type[BaseModel]
Key = tuple[str, ...]

ENTRIES = {
    "rl": ("prime_rl.entrypoints.rl", "medarc_rl.medarc_train", "medarc_rl.medarc_slurm"),
    "sft": (
        "prime_rl.entrypoints.sft",
        "prime_rl.trainer.sft.train",
        "prime_rl.eval.evaluate",
        "prime_rl.inference.server",
        "prime_rl.inference.vllm.plugin",
        "prime_rl.inference.vllm.worker",
        "medarc_rl.medarc_train",
        "medarc_rl.medarc_slurm",
    ),
    "trainer": ("prime_rl.trainer.rl.train",),
    "orchestrator": ("prime_rl.orchestrator.orchestrator",),
    "inference": ("prime_rl.inference.server", "prime_rl.inference.vllm.plugin", "prime_rl.inference.vllm.worker"),
    "env_server": ("prime_rl.orchestrator.env_server",),
    "eval": ("prime_rl.entrypoints.eval", "prime_rl.eval.evaluate", "medarc_rl.medarc_train"),
}
ENTRIES["dpo"] = ENTRIES["rm"] = ENTRIES["sft"]
"""The modules that the processes of each command start with."""

HANDED_ON = {
    "rl.monitor": ("prime_rl.configs.rl.propagation", "monitor"),
    "prime_rl.configs.rl.sections.SharedLogConfig": ("prime_rl.configs.rl.propagation", "log"),
    "prime_rl.configs.rl.sections.SharedCheckpointConfig": ("prime_rl.configs.rl.propagation", "ckpt"),
    "rl.judge": ("prime_rl.configs.rl.propagation", "judge"),
    "rl.model.vision": ("prime_rl.configs.rl.propagation", "vision"),
    "prime_rl.configs.data.LossMaskConfig": ("prime_rl.trainer.sft.data.samples", "loss_mask"),
    "prime_rl.configs.data.ColumnsConfig": ("prime_rl.trainer.sft.data.messages", "of_rows"),
    "prime_rl.configs.sft.SFTEvalConfig": ("prime_rl.configs.sft", "eval"),
    "prime_rl.configs.rollouts.judges.JudgeEngineConfig": ("prime_rl.configs.rollouts.judges", "engine"),
    "prime_rl.configs.inference.InferenceConfig": ("prime_rl.inference.vllm.serve", "model"),
    "prime_rl.configs.inference.ModelConfig": ("prime_rl.inference.vllm.serve", "model"),
    **{
        f"{place}.{key}": ("prime_rl.configs.rollouts.judges", "max_concurrent")
        for place in ("sft.eval.judge", "dpo.eval.judge", "rm.eval.judge", "orchestrator.judge", "eval.judge")
        for key in ("gpus", "device", "engine")
    },
}
"""Keys and sections that are read where the checks above do not see it: in a loop over the keys, by `model_dump`, by
`getattr` with a computed name, or by a launcher that another command starts. The module that does so, and an attribute
of the same section that mypy sees it read, which shows that the value reaches this place."""

BEFORE_LOADING = {
    "rl.allocation_mode": "launched.py takes it from the tables, because it decides what the other keys become",
    "sft.allocation_mode": "as `rl.allocation_mode`",
    "dpo.allocation_mode": "as `rl.allocation_mode`",
    "rm.allocation_mode": "as `rl.allocation_mode`",
    **{
        f"{root}.storage.work_dir": "a validator takes it from the table that `output_dir` on S3 becomes"
        for root in ("rl", "sft", "dpo", "rm", "eval")
    },
}
"""Keys that are read from tables before there is a config. Their own tests check what they do."""

BOUNDS = {
    "rl.deployment.gpus_per_node": "the most GPUs that the components may have together",
    "sft.deployment.gpus_per_node": "the most processes of a run",
    "trainer.model.impl": "all values mean Transformers' code; `custom` warns",
    "sft.model.impl": "as `trainer.model.impl`",
    "rl.deployment.num_teacher_nodes": "must stay unset: a run on several nodes starts no teacher",
    "sft.loss_impl": "`torch` is the only value that is supported",
    "dpo.loss.score_margin": "a validator gives it to `[data]`, whose `score_margin` the reader of rows takes",
    "rm.loss.score_margin": "as `dpo.loss.score_margin`",
}
BOUNDS |= {
    key.replace("sft.", f"{root}.", 1): why
    for root in ("dpo", "rm")
    for key, why in BOUNDS.items()
    if key.startswith("sft.")
}
"""Keys that do their work in rules alone."""


HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
SOURCES = {"prime_rl": REPOSITORY / "prime-rl" / "src", "medarc_rl": REPOSITORY}
"""The packages whose code counts, and the folders that hold them."""

MYPY_INI = f"""[mypy]
plugins = {HERE / "note_config_reads.py"}
follow_imports = skip
ignore_missing_imports = True
check_untyped_defs = True
incremental = False
cache_dir = {os.devnull}
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Read:
    """`owner.attribute`, read in a function of a module; `function` is empty outside of one."""

    owner: str
    """Full name of the config class."""
    attribute: str
    module: str
    function: str
    """Name of the outermost function or method around the read, with its class."""


def all_reads(scratch: Path) -> frozenset[Read]:
    """Every read of a config attribute in both packages."""
    ini, found = scratch / "mypy.ini", scratch / "reads"
    ini.write_text(MYPY_INI, encoding="utf-8")
    found.touch()
    packages = [word for package in SOURCES for word in ("-p", package)]
    subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ini), *packages],
        env=os.environ | {"KEY_READS": str(found), "MYPYPATH": os.pathsep.join(map(str, SOURCES.values()))},
        capture_output=True,  # its complaints about types are not the subject here
        check=False,
        cwd=scratch,
    )
    return frozenset(_read_of(line) for line in found.read_text(encoding="utf-8").splitlines())


def _read_of(line: str) -> Read:
    owner, attribute, rest = line.split(" ", 2)
    path, _, number = rest.rpartition(" ")
    return Read(owner, attribute, module_of(Path(path)), _function_at(Path(path), int(number)))


def module_of(path: Path) -> str:
    """Dotted name of a source file."""
    for package, folder in SOURCES.items():
        if path.is_relative_to(folder / package):
            return ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
    raise ValueError(f"{path} is in none of {list(SOURCES)}")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _functions(path: Path) -> tuple[tuple[int, int, str], ...]:
    """First line, last line and name of each function that is in no other."""
    found = []
    for node in tree_of(path).body:
        methods = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        found += [
            (method.lineno, method.end_lineno or method.lineno, prefix + method.name)
            for method in methods
            if isinstance(method, Function)
        ]
    return tuple(found)


def _function_at(path: Path, line: int) -> str:
    return next((name for first, last, name in _functions(path) if first <= line <= last), "")


def functions_that_call(path: Path, name: str) -> set[str]:
    """The functions and methods of a file with a call of `name`."""
    return {
        _function_at(path, node.lineno)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    }


@cache
def module_paths() -> Mapping[str, Path]:
    """Every module of both packages."""
    paths = [path for package, folder in SOURCES.items() for path in (folder / package).rglob("*.py")]
    return {module_of(path): path for path in paths}


@cache
def imports_of(module: str) -> frozenset[str]:
    """The modules of ours that a module imports, in functions too, but not for type checkers alone."""
    found: set[str] = set()
    for node in _running(tree_of(module_paths()[module])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found & module_paths().keys())


def _running(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _running(child)


@cache
def modules_of(*entries: str) -> frozenset[str]:
    """The modules that run with any of these ones."""
    found: set[str] = set()
    waiting = list(entries)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += imports_of(module)
    return frozenset(found)


def reads_of_command(component: str, reads: frozenset[Read]) -> frozenset[Read]:
    """The reads that give keys a meaning when this command runs."""
    running = modules_of(*ENTRIES[component])
    counted = {read for read in reads if _has_effect(read, running)}
    # What a method or property of a config reads counts once the method is used.
    while True:
        used = {definition_of(read.owner, read.attribute) for read in counted}
        inside = {read for read in reads - counted if f"{read.module}.{read.function}" in used}
        if not inside:
            return frozenset(counted)
        counted |= inside


@cache
def definition_of(owner: str, attribute: str) -> str:
    """The full name of a class's attribute, in the base that defines it."""
    module, _, name = owner.rpartition(".")
    kind = getattr(importlib.import_module(module), name, None) if module.startswith("prime_rl.configs") else None
    for base in getattr(kind, "__mro__", ()):
        if attribute in vars(base):
            return f"{base.__module__}.{base.__qualname__}.{attribute}"
    return f"{owner}.{attribute}"


def _has_effect(read: Read, running: frozenset[str]) -> bool:
    if not read.module.startswith("prime_rl.configs."):
        return read.module in running and not read.function.endswith("faults")
    if read.module == "prime_rl.configs.rl.propagation" or (read.module, read.function) in used_functions(running):
        return True
    return bool(read.function) and read.function in functions_that_call(module_paths()[read.module], "derive")


@cache
def used_functions(running: frozenset[str]) -> frozenset[tuple[str, str]]:
    """Functions of config modules that other running modules import, and those that they call in turn."""
    waiting = [
        (module, name)
        for user in running
        if not user.startswith("prime_rl.configs.")
        for module, name in imported_names(user).values()
        if module.startswith("prime_rl.configs.") and not name.endswith("faults")
    ]
    found: set[tuple[str, str]] = set()
    while waiting:
        module, name = waiting.pop()
        function = next(
            (each for each in tree_of(module_paths()[module]).body if getattr(each, "name", "") == name), None
        )
        if (module, name) in found or not isinstance(function, Function):
            continue
        found.add((module, name))
        for node in ast.walk(function):
            if isinstance(node, ast.Name):
                waiting.append(imported_names(module).get(node.id, (module, node.id)))
    return frozenset(found)


@cache
def imported_names(module: str) -> Mapping[str, tuple[str, str]]:
    """Names that a module imports from modules of ours: the module and the name there."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in _running(tree_of(module_paths()[module]))
        if isinstance(node, ast.ImportFrom) and node.module in module_paths()
        for alias in node.names
    }


def keys_of(component: str, section: Section, prefix: Key = ()) -> Iterator[tuple[Key, Section]]:
    """Each key and its class, but for the `type` of a union, which chooses the class, and for what is not supported."""
    for name, field in section.model_fields.items():
        path = (*prefix, name)
        key = ".".join((component, *path))
        # What `sft` does not support, `dpo` and `rm` do not either.
        names = (key, re.sub(r"^(dpo|rm)\.", "sft.", key))
        if name == "toml_files" or any(entry.key in names and not entry.values for entry in NOT_BUILT):
            continue
        if name == "type" and isinstance(tag_of(section), str) and field.annotation is not str and is_tag(section):
            continue
        kinds = alternatives(field.annotation)
        children = [
            child
            for child in (*sections_among(kinds), *sections_among(list_items(kinds) or table_items(kinds) or ()))
            if not issubclass(child, RootConfig) and not is_unsupported_variant(key, child)
        ]
        below = [found for child in children for found in keys_of(component, child, path)]
        # A table whose every key is not supported is read by nobody either.
        if below or not children:
            yield path, section
        yield from below


def is_tag(section: Section) -> bool:
    """Whether `type` of this class has one value only."""
    return len(getattr(section.model_fields["type"].annotation, "__args__", ())) == 1


def is_unsupported_variant(key: str, variant: Section) -> bool:
    return any(entry.key == f"{key}.type" and tag_of(variant) in entry.values for entry in NOT_BUILT)


def names_of(section: Section, reads: frozenset[Read]) -> set[str]:
    """The class, the parents from which it may have a key, and the protocols that it fulfils."""
    parents = {f"{parent.__module__}.{parent.__qualname__}" for parent in section.__mro__}
    protocols = {read.owner for read in reads if not read.owner.startswith("prime_rl.configs.")}
    members = {*section.model_fields, *dir(section)}
    return parents | {name for name in protocols if members_of(name) <= members}


@cache
def members_of(protocol: str) -> frozenset[str]:
    """Names of the properties, methods and annotations in a protocol's body."""
    module, _, name = protocol.rpartition(".")
    (body,) = [each.body for each in tree_of(module_paths()[module]).body if getattr(each, "name", "") == name]
    functions = {each.name for each in body if isinstance(each, Function)}
    return frozenset(functions | {ast.unparse(each.target) for each in body if isinstance(each, ast.AnnAssign)})


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> frozenset[Read]:
    return all_reads(tmp_path_factory.mktemp("reads"))


def is_below(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.component)
def test_every_key_has_a_reader(root: type[RootConfig], reads: frozenset[Read]) -> None:
    found = {(read.owner, read.attribute) for read in reads_of_command(root.component, reads)}
    unread = []
    for path, section in keys_of(root.component, root):
        key = ".".join((root.component, *path))
        names = names_of(section, reads)
        known = is_below(key, HANDED_ON) or names & HANDED_ON.keys() or key in BOUNDS or key in BEFORE_LOADING
        if not known and not any((name, path[-1]) in found for name in names):
            unread.append(key)
    assert unread == []


@pytest.mark.parametrize("name", HANDED_ON)
def test_a_section_that_is_read_as_a_whole_reaches_its_reader(name: str, reads: frozenset[Read]) -> None:
    module, attribute = HANDED_ON[name]
    assert any((read.module, read.attribute) == (module, attribute) for read in reads)


@pytest.mark.parametrize("key", [*BOUNDS, *BEFORE_LOADING])
def test_a_key_that_nothing_reads_as_an_attribute_exists(key: str) -> None:
    component, *path = key.split(".")
    (root,) = [root for root in ROOTS if root.component == component]
    assert tuple(path) in {found for found, _ in keys_of(component, root)}


def test_a_read_counts_for_the_class_it_is_of(reads: frozenset[Read]) -> None:
    """What this test is for: a key of the trainer's `ckpt` has a reader there, and one of another `ckpt` has not."""
    readers = {read.module for read in reads if read.attribute == "keep_best" and read.function}
    assert "prime_rl.trainer.checkpoints.manager" in readers
    owners = {read.owner for read in reads if read.attribute == "wait_for_weights_timeout"}
    assert owners == {"prime_rl.configs.orchestrator.CheckpointConfig"}
    assert not {read for read in reads_of_command("trainer", reads) if read.attribute == "wait_for_weights_timeout"}
