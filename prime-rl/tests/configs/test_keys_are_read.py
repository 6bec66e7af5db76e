"""Every key does something: code reads it, or it stands in `NOT_BUILT`, and setting it is refused or warned of.

What counts as reading a key:

- mypy says which class an expression has, so `ckpt.interval` counts for the class of `ckpt` at that place: the trainer
  and the orchestrator have a `CheckpointConfig` each.
- The module must be one that the command imports, at any depth and inside functions too. What only SFT reads of a
  section that the RL trainer has as well does not count for the RL trainer.
- Rules do not count: a key that is only compared with another one does nothing. Of the config classes' own code, a
  validator counts if it derives values, a property if something reads it, and so does what `rl` hands to its
  components.

Two keys that have the same class in one root (`data` and `val.data` of SFT) are not told apart.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from prime_rl.configs.rollouts.judges import JudgeConfig
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
"""The modules that the processes of each command start with."""

SHARED_SINKS = (
    *("tensorboard", "tensorboard.directory"),
    *("trackio", "trackio.project", "trackio.name", "trackio.directory", "trackio.space"),
    *("swanlab", "swanlab.project", "swanlab.name", "swanlab.directory", "swanlab.online"),
    *("mlflow", "mlflow.project", "mlflow.name", "mlflow.uri"),
)

READ_BY_NAME = {
    **{f"rl.monitor.{key}": ("prime_rl.configs.rl.propagation", "in run.shared.monitor:") for key in SHARED_SINKS},
    "prime_rl.configs.rl.sections.SharedLogConfig": ("prime_rl.configs.rl.propagation", "in run.shared.log:"),
    "prime_rl.configs.rl.sections.SharedCheckpointConfig": ("prime_rl.configs.rl.propagation", "in run.shared.ckpt:"),
    "prime_rl.configs.rows.LossMaskConfig": (
        "prime_rl.trainer.sft.data.conversation",
        "getattr(loss_mask, role)",
    ),
    "prime_rl.configs.rows.ColumnsConfig": ("prime_rl.trainer.sft.data.formats", "columns.of_rows"),
    "prime_rl.configs.sft.SFTEvalConfig": (
        "prime_rl.configs.sft",
        "return OfflineEvalConfig(",
    ),
    "prime_rl.configs.rollouts.judges.JudgeEngineConfig": (
        "prime_rl.configs.rollouts.judges",
        "self.engine.model_dump()",
    ),
    **{
        f"{place}.{key}": ("prime_rl.configs.rollouts.frozen", text)
        for place in ("sft.eval.judge", "orchestrator.judge", "eval.judge")
        for key, text in {
            "gpus": "judge.gpus_on(device)",
            "device": "judge.server(device)",
            "engine": "judge.server(device)",
            "max_concurrent": "judge.max_concurrent",
        }.items()
    },
    "rl.teacher_inference": ("prime_rl.configs.rollouts.frozen", "config.teacher_inference,"),
    **{
        f"rl.judge.{key}": ("prime_rl.configs.rl.propagation", "explicit_values(judge)")
        for key in JudgeConfig.model_fields
    },
    "prime_rl.configs.inference.InferenceConfig": ("prime_rl.inference.vllm.arguments", "config.to_vllm()"),
    "prime_rl.configs.inference.ModelConfig": ("prime_rl.inference.vllm.arguments", "config.to_vllm()"),
    **{
        f"{root}.allocation_mode": ("prime_rl.configs.areal.launched", 'data.get("allocation_mode")')
        for root in ("rl", "sft")
    },
    **{f"{root}.storage": ("prime_rl.launch.run", "config.storage") for root in ("rl", "sft", "eval")},
    **{
        f"{root}.storage.work_dir": ("prime_rl.configs.storage", 'table.get("work_dir")')
        for root in ("rl", "sft", "eval")
    },
    "eval.dry_run": ("prime_rl.launch.run", "config.dry_run"),
    "eval.file_access": ("prime_rl.launch.run", "config.file_access"),
}
"""What mypy does not see: sections all of whose keys are read in one expression, and keys that are read through a
protocol. The module, and its text."""

BOUNDS = {
    "rl.deployment.gpus_per_node": "the most GPUs that the components may have together",
    "sft.deployment.gpus_per_node": "the most processes of a run",
    "trainer.model.impl": "`hf` and `auto` mean the same as long as `custom` is not supported",
    "sft.model.impl": "as `trainer.model.impl`",
    "rl.deployment.num_teacher_nodes": "must stay unset: a run on several nodes starts no teacher",
    "sft.loss_impl": "`torch` is the only value that is supported",
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


def modules_of(*entries: str) -> set[str]:
    """The modules that run with any of these ones."""
    found: set[str] = set()
    waiting = list(entries)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += imports_of(module)
    return found


def reads_of_command(component: str, reads: frozenset[Read]) -> frozenset[Read]:
    """The reads that give keys a meaning when this command runs."""
    running = modules_of(*ENTRIES[component])
    counted = {read for read in reads if _has_effect(read, running)}
    # What a method or property of a config reads counts once the method is used.
    while True:
        used = {f"{read.owner}.{read.attribute}" for read in counted}
        inside = {read for read in reads - counted if f"{read.module}.{read.function}" in used}
        if not inside:
            return frozenset(counted)
        counted |= inside


def _has_effect(read: Read, running: set[str]) -> bool:
    if not read.module.startswith("prime_rl.configs."):
        return read.module in running and not read.function.endswith("faults")
    if read.module == "prime_rl.configs.rl.propagation":
        return True
    return bool(read.function) and read.function in functions_that_call(module_paths()[read.module], "derive")


def keys_of(component: str, section: Section, prefix: Key = ()) -> Iterator[tuple[Key, Section]]:
    """Each key and its class, but for the `type` of a union, which chooses the class, and for what is not supported."""
    for name, field in section.model_fields.items():
        path = (*prefix, name)
        key = ".".join((component, *path))
        if name == "toml_files" or any(entry.key == key and not entry.values for entry in NOT_BUILT):
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


def names_of(section: Section) -> set[str]:
    """The class and the parents from which it may have a key."""
    return {f"{parent.__module__}.{parent.__qualname__}" for parent in section.__mro__}


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> frozenset[Read]:
    return all_reads(tmp_path_factory.mktemp("reads"))


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.component)
def test_every_key_has_a_reader(root: type[RootConfig], reads: frozenset[Read]) -> None:
    found = {(read.owner, read.attribute) for read in reads_of_command(root.component, reads)}
    unread = []
    for path, section in keys_of(root.component, root):
        key = ".".join((root.component, *path))
        names = names_of(section)
        known = {key, *names} & (BOUNDS.keys() | READ_BY_NAME.keys())
        if not known and not any((name, path[-1]) in found for name in names):
            unread.append(key)
    assert unread == []


@pytest.mark.parametrize("name", READ_BY_NAME)
def test_what_is_read_without_mypy_seeing_it_still_is(name: str) -> None:
    module, text = READ_BY_NAME[name]
    assert text in module_paths()[module].read_text(encoding="utf-8")


@pytest.mark.parametrize("key", BOUNDS)
def test_a_key_that_bounds_others_exists(key: str) -> None:
    component, *path = key.split(".")
    (root,) = [root for root in ROOTS if root.component == component]
    assert tuple(path) in {found for found, _ in keys_of(component, root)}


def test_a_read_counts_for_the_class_it_is_of(reads: frozenset[Read]) -> None:
    """What this test is for: the trainer's `ckpt.keep_best` has a reader, and no other `ckpt` has that key."""
    readers = {read.module for read in reads if read.attribute == "keep_best" and read.function}
    assert "prime_rl.trainer.checkpoints.manager" in readers
    owners = {read.owner for read in reads if read.attribute == "wait_for_weights_timeout"}
    assert owners == {"prime_rl.configs.orchestrator.CheckpointConfig"}
    assert not {read for read in reads_of_command("trainer", reads) if read.attribute == "wait_for_weights_timeout"}
