"""Docstrings and comments name what exists, and refer to no page outside the repository.

A span in backticks that looks like a name, a dotted name or a source file is looked up: as a file, a module and what it
defines, a config key, or as names that the repository's code defines or uses. `tests/test_docs.py` does the same for
the documents.
"""

from __future__ import annotations

import ast
import builtins
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from prime_rl.configs.surface.docs import ROOTS, sections_of_root
from prime_rl.configs.surface.renamed import find_renamed
from prime_rl.utils.pydantic_config.schema import has_key

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"medarc_rl": ROOT / "medarc_rl", "prime_rl": ROOT / "prime-rl" / "src" / "prime_rl"}
FOLDERS = (*PACKAGES.values(), ROOT / "prime-rl" / "tests", ROOT / "tests", ROOT / "benchmarks", ROOT / "examples")
SOURCES = sorted({path for folder in FOLDERS for path in folder.rglob("*.py")} - {Path(__file__).resolve()})
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "prime-rl").glob("*.md")]
TEXTS = [*SOURCES, *DOCUMENTS, *(ROOT / "medarc_rl").rglob("*.j2"), *(ROOT / "examples").rglob("*.toml")]

SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
SOURCE_FILE = re.compile(r"(?!OUT/)[\w./-]+\.(?:py|md|j2)")
"""`OUT/` holds what a run writes."""
OUTPUT = re.compile(r"\.(?:json|jsonl|toml|log|txt|bin|pt|safetensors)$")
"""Ends of file names of a run, which the code makes from parts."""
WORD = re.compile(r"[A-Za-z_]\w*")
NUMBERED_SECTION = re.compile(r"\bsections? \d|§|\bruntime behaviou?r\b", re.IGNORECASE)

ELSEWHERE = {"AsyncOpenAI.post", "BadRequestError", "torch.multinomial", "smollm", "ping", "Class.method", "sg"}
"""Names of other projects and of formulas."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def names_of(path: Path) -> frozenset[str]:
    return frozenset(names_in(tree_of(path)))


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring (of fields too) and each block of comments."""
    source = path.read_text(encoding="utf-8")
    for docstring in docstrings(tree_of(path)):
        yield docstring.lineno, str(docstring.value)
    block: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != block[-1].start[0] + 1:
                yield block[0].start[0], " ".join(each.string.lstrip("# ") for each in block)
                block = []
            block.append(token)
    if block:
        yield block[0].start[0], " ".join(each.string.lstrip("# ") for each in block)


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            text = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield text


def names_in(tree: ast.Module) -> Iterator[str]:
    """Every name that a module defines, imports or uses, and the words of its strings, but not of its docstrings."""
    told = {id(docstring) for docstring in docstrings(tree)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                module = getattr(node, "module", None) or ""
                yield from WORD.findall(" ".join([module, *(f"{each.name} {each.asname or ''}" for each in aliases)]))
            case ast.Constant(value=str(text)) if id(node) not in told:
                yield from WORD.findall(text)


@cache
def known_names() -> frozenset[str]:
    known = {*dir(builtins), *keyword.kwlist}
    for path in SOURCES:
        known |= {*names_of(path), *path.relative_to(ROOT).with_suffix("").parts}
    for pattern in ("*.toml", "medarc_rl/**/*.j2", "examples/**/*.toml", "prime-rl/*.toml"):
        for path in ROOT.glob(pattern):
            known |= set(WORD.findall(path.read_text(encoding="utf-8")))
    return frozenset(known)


@cache
def rooms() -> frozenset[str]:
    """The packages, and the folders and modules directly in the engine."""
    inside = {path.stem for path in PACKAGES["prime_rl"].iterdir() if path.suffix in ("", ".py")}
    return frozenset({*PACKAGES, *inside} - {"__init__", "__pycache__"})


@cache
def is_module_or_in_one(dotted: str) -> bool:
    """Whether `a.b.c` is a module, or a name that a module defines, from a package or from a room of the engine."""
    parts = dotted.split(".")
    bases = [PACKAGES[parts[0]]] if parts[0] in PACKAGES else list(PACKAGES.values())
    parts = parts[1:] if parts[0] in PACKAGES else parts
    for base in bases:
        for length in range(len(parts), -1, -1):
            place, rest = base.joinpath(*parts[:length]), parts[length:]
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            if (file.is_file() or place.is_dir()) and not rest:
                return True
            if file.is_file() and set(rest) <= names_of(file):
                return True
    return False


@cache
def is_config_key(dotted: str) -> bool:
    """Whether a root class, or a section at any depth, has this key; or another version of PRIME-RL had it."""
    sections = {section for root in ROOTS for section in sections_of_root(root)}
    component, _, rest = dotted.partition(".")
    of_component = [root for root in ROOTS if root.component == component and rest]
    return (
        any(has_key(section, dotted.split(".")) for section in sections)
        or any(has_key(root, rest.split(".")) for root in of_component)
        or any(find_renamed(root.component, dotted) is not None for root in ROOTS)
    )


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """The classes of both packages by name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def has_member(name: str, member: str) -> bool:
    """Whether a class, or a parent of it, has this member. A parent of another project may have any."""
    if name not in classes():
        return True
    for node in classes()[name]:
        if member in set(names_in(ast.Module(node.body, []))):
            return True
        parents = [parent.id for parent in node.bases if isinstance(parent, ast.Name)]
        if len(parents) < len(node.bases) or any(has_member(parent, member) for parent in parents):
            return True
    return False


def exists(span: str) -> bool:
    if SOURCE_FILE.fullmatch(span):
        return any(str(path).endswith(f"/{span.removeprefix('./')}") for path in TEXTS)
    dotted = span.removesuffix("()")
    if span in ELSEWHERE or is_config_key(dotted) or is_module_or_in_one(dotted):
        return True
    parts = dotted.split(".")
    if len(parts) > 1 and not has_member(parts[0], parts[1]):
        return False
    # `trainer.checkpoints.gone` is a path in this repository, not a chain of any names that exist somewhere.
    return (len(parts) == 1 or parts[0] not in rooms()) and set(parts) <= known_names()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_names_in_backticks_exist(folder: Path) -> None:
    missing = [
        f"{path.relative_to(ROOT)}:{line}: `{span}`"
        for path in SOURCES
        if path.is_relative_to(folder)
        for line, text in texts_of(path)
        for span in SPAN.findall(text)
        if (SOURCE_FILE.fullmatch(span) or (DOTTED.fullmatch(span) and not OUTPUT.search(span))) and not exists(span)
    ]
    assert missing == []


def test_no_text_refers_to_a_numbered_section() -> None:
    """Pages here have headings without numbers, so a number is that of a page which readers do not have."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in TEXTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if NUMBERED_SECTION.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "span",
    ["_log_options", "trainer.checkpoints.background", "launchers/gone.py", "ckpt.keeps_last", "RunPaths.never()"],
)
def test_a_name_that_is_gone_is_found(span: str) -> None:
    assert not exists(span)


@pytest.mark.parametrize(
    "span",
    [
        "RunPaths",
        "trainer.checkpoints.retention",
        "prime_rl.run.paths.RunPaths",
        "retention.py",
        "ckpt.keep_last",
        "rl.ckpt",
    ],
)
def test_a_name_that_is_there_is_found(span: str) -> None:
    assert exists(span)
