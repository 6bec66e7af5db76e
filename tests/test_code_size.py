"""The code keeps its size: the centre of a project grows unless something cuts it."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "medarc_rl").rglob("*.py"), *(ROOT / "prime-rl" / "src").rglob("*.py")])
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def all_bodies() -> dict[str, int]:
    return {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": body_lines(node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, FUNCTIONS)
    }


def test_files_stay_short() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name: count for name, count in lines.items() if count > 500 and "/models/" not in name} == {}
    assert statistics.median(lines.values()) < 200


def test_functions_stay_short() -> None:
    bodies = all_bodies()
    assert {name: count for name, count in bodies.items() if count > 60} == {}
    assert sum(count <= 35 for count in bodies.values()) >= 0.9 * len(bodies)
