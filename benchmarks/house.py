"""Measure the shape of the source: `uv run python benchmarks/house.py [REVISION …]`.

Prints one column for the working tree and one for each Git revision: sizes, modules with one importer, import
cycles, shares of imports and comments, private functions with one call, exception classes, and words of the pages.
`--list` prints the modules behind the figures of the working tree.
"""

import argparse
import ast
import io
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"prime_rl": "prime-rl/src/prime_rl", "medarc_rl": "medarc_rl"}
SHORT_LINES = 40
NEWLINE = "\n"


@dataclass(slots=True)
class Module:
    """One source file: its text, its syntax tree, and the modules of the two packages that it imports."""

    name: str
    path: Path
    text: str
    tree: ast.Module
    imports: set[str] = field(default_factory=set)
    imports_at_start: set[str] = field(default_factory=set)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def read_modules(root: Path) -> dict[str, Module]:
    """Read every module of the two packages under `root`, and resolve their imports."""
    modules: dict[str, Module] = {}
    for package, folder in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            text = path.read_text(encoding="utf-8")
            modules[name] = Module(name, path.relative_to(root), text, ast.parse(text))
    for module in modules.values():
        module.imports = resolve(module.tree, modules, at_start=False) - {module.name}
        module.imports_at_start = resolve(module.tree, modules, at_start=True) - {module.name}
    return modules


def resolve(tree: ast.Module, modules: dict[str, Module], *, at_start: bool) -> set[str]:
    """Return the known modules that a tree imports; `at_start` leaves out imports in functions and for types."""
    found: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        )
        if at_start and lazy:
            continue
        pending.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                target = full if full in modules else node.module
                if target in modules:
                    found.add(target)
    return found


def cycles(modules: dict[str, Module], *, at_start: bool) -> list[list[str]]:
    """Return the strongly connected components with more than one module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        module = modules[name]
        for target in module.imports_at_start if at_start else module.imports:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            at = stack.index(name)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    sys.setrecursionlimit(10_000)
    for name in modules:
        if name not in index:
            visit(name)
    return found


def single_importers(modules: dict[str, Module]) -> list[tuple[str, str]]:
    """Return (module, importer) where exactly one module imports it and stands in the same folder."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for target in module.imports:
            importers[target].add(module.name)
    return [
        (name, next(iter(by)))
        for name, by in sorted(importers.items())
        if len(by) == 1
        and not modules[name].is_package
        and modules[next(iter(by))].path.parent == modules[name].path.parent
    ]


def comment_and_import_lines(module: Module) -> tuple[int, int, int]:
    """Return the lines of a module that hold comments, imports, and code of any kind (no docstrings)."""
    comments = sum(
        token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(module.text).readline)
    )
    imports: set[int] = set()
    docstrings: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code = sum(
        bool(line.strip()) and number not in docstrings and not line.lstrip().startswith("#")
        for number, line in enumerate(module.text.splitlines(), 1)
    )
    return comments, len(imports), code


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def private_with_one_call(modules: dict[str, Module]) -> tuple[int, int]:
    """Return the private functions whose name their module mentions once beside its definition, and all functions."""
    one = total = 0
    for module in modules.values():
        mentions = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Name | ast.Attribute)
        )
        for function in functions(module.tree):
            total += 1
            private = function.name.startswith("_") and not function.name.startswith("__")
            one += private and mentions[function.name] == 1
    return one, total


def exception_classes(modules: dict[str, Module]) -> int:
    """Count classes with a base that is an exception, by name or because this source defines it as one."""
    bases = {
        node.name: [re.split(r"[.\[]", ast.unparse(base))[-1] for base in node.bases]
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    known = {"Exception", "BaseException"}
    named = re.compile(r"(Error|Exception|Exit|Interrupt)$")
    while grown := {
        name for name, of in bases.items() if name not in known and any(b in known or named.search(b) for b in of)
    }:
        known |= grown
    return len(known & bases.keys())


def words(paths: list[Path]) -> int:
    """Count the words of pages, without blocks of code."""
    return sum(len(re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S).split()) for path in paths)


def figures(root: Path) -> dict[str, str]:
    """Measure the source and the pages under `root`."""
    modules = read_modules(root)
    lines = [module.lines for module in modules.values()]
    counted = [comment_and_import_lines(module) for module in modules.values()]
    comments, imports, code = (sum(column) for column in zip(*counted, strict=True))
    bodies = sorted(body_lines(function) for module in modules.values() for function in functions(module.tree))
    one, total = private_with_one_call(modules)
    short = [module for module in modules.values() if module.lines < SHORT_LINES and not module.is_package]
    pages = [path for path in (root / "docs").rglob("*.md") if "generated" not in path.parts]
    tests = [path for folder in ("tests", "prime-rl/tests") for path in (root / folder).rglob("*.py")]
    folders = Counter(module.path.parent for module in modules.values() if not module.is_package)
    return {
        "lines": f"{sum(lines):,}",
        "files": f"{len(modules):,}",
        "modules (files other than __init__.py)": f"{sum(not module.is_package for module in modules.values()):,}",
        "file lines: median / max": f"{statistics.median(lines):.0f} / {max(lines):,}",
        "folders with one or two modules": str(sum(count <= 2 for count in folders.values())),
        "modules with one importer, beside it": str(len(single_importers(modules))),
        f"modules under {SHORT_LINES} lines": str(len(short)),
        "imports, share of code": f"{imports / code:.1%}",
        "comments, share of code": f"{comments / code:.1%}",
        "functions": f"{total:,}",
        "body lines: median / p90 / max": (
            f"{statistics.median(bodies):.0f} / {bodies[len(bodies) * 9 // 10]} / {bodies[-1]}"
        ),
        "private functions with one call": f"{one:,} ({one / total:.0%})",
        "exception classes": str(exception_classes(modules)),
        "import cycles (all / at start)": (
            f"{len(cycles(modules, at_start=False))} / {len(cycles(modules, at_start=True))}"
        ),
        "modules in cycles": str(sum(map(len, cycles(modules, at_start=False)))),
        "words of README": f"{words([root / 'README.md']):,}",
        "pages of docs/ / words": f"{len(pages)} / {words(pages):,}",
        "words of CHANGELOG": f"{words([root / 'CHANGELOG.md']):,}",
        "lines of tests": f"{sum(path.read_text(encoding='utf-8').count(NEWLINE) for path in tests):,}",
    }


def at_revision(revision: str) -> dict[str, str]:
    """Measure a Git revision, unpacked in a temporary folder."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
        return figures(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs="*", metavar="REVISION")
    parser.add_argument("--list", action="store_true", help="also print the modules behind the figures")
    options = parser.parse_args()
    columns = [at_revision(revision) for revision in options.revisions] + [figures(ROOT)]
    for heading, row in zip(("", *columns[0]), zip(*(("", *c.values()) for c in columns), strict=True), strict=True):
        cells = [*options.revisions, "working tree"] if not heading else row
        print(f"{heading:42}" + "".join(f"{cell:>18}" for cell in cells))
    if options.list:
        modules = read_modules(ROOT)
        print("\nwith one importer beside it:")
        print(*(f"  {name}  <- {by.rpartition('.')[2]}" for name, by in single_importers(modules)), sep="\n")
        print(f"\nunder {SHORT_LINES} lines:")
        short = [m for m in modules.values() if m.lines < SHORT_LINES and not m.is_package]
        print(*(f"  {module.lines:3} {module.name}" for module in short), sep="\n")
        print("\ncycles:")
        print(*(f"  {' '.join(component)}" for component in cycles(modules, at_start=False)), sep="\n")


if __name__ == "__main__":
    main()
