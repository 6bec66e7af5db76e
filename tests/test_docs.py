"""The documents name files and definitions that exist, and their configs load.

`mkdocs build --strict` checks links, anchors and the menu.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.configs.dpo import DPOConfig
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.rm import RewardModelConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.utils.pydantic_config import load_config

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ROOT / "prime-rl" / "src" / "prime_rl"
README = ROOT / "README.md"
COMMANDS_GENERATOR = ROOT / "docs" / "generate" / "commands.py"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = [
    README,
    ROOT / "AGENTS.md",
    ROOT / "CHANGELOG.md",
    ROOT / "prime-rl" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
    *sorted((ROOT / "benchmarks").glob("*/README.md")),
]

CODE_SPAN = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"(?:\.\./)*[\w.-]+(?:/[\w.-]+)*/?")
REPOSITORY_PATH = re.compile(r"(?<![\w./~-])(?:\.ci|benchmarks|docs|examples|medarc_rl|prime-rl)/[\w./-]*\w")

MADE_BY_A_RUN = ("OUT/", "RUN/", "outputs/", "environments/dosing/", "my_rl.py")
"""Beginnings of paths that a run writes, or that a test takes from a page. Pages use the first ones for everything in a
run's directory."""


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=page_id)


def paths_in(page: Path) -> Iterator[str]:
    """Code spans that name a file or folder of the repository."""
    bases = (ROOT, ENGINE, page.parent)
    for span in CODE_SPAN.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if span.startswith(MADE_BY_A_RUN) or not PATH.fullmatch(span):
            continue
        first = next(part for part in span.split("/") if part != "..")
        if span.endswith(".py") or ("/" in span and any((base / first).exists() for base in bases)):
            yield span


@every_page
def test_every_path_in_a_page_exists(page: Path) -> None:
    bases = (ROOT, ENGINE, page.parent)
    missing = {path for path in paths_in(page) if not any((base / path).exists() for base in bases)}
    text = page.read_text(encoding="utf-8")
    missing |= {path for path in REPOSITORY_PATH.findall(text) if not (ROOT / path).exists()}
    assert missing == set()


def test_the_architecture_page_names_definitions_of_the_files_that_it_lists() -> None:
    """In its tables, a row starts with a Python file, and the code spans of its second cell are defined in there."""
    unknown, checked = [], 0
    for line in ARCHITECTURE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or not re.fullmatch(r"`[\w./-]+\.py`", cells[0]):
            continue
        file = cells[0].strip("`")
        source = next(base / file for base in (ROOT, ENGINE) if (base / file).exists())
        known = definitions_of(source)
        for name in CODE_SPAN.findall(cells[1]):
            checked += 1
            if name not in known:
                unknown.append(f"{file}: {name}")
    assert unknown == []
    assert checked > 40


def definitions_of(source: Path) -> set[str]:
    """Functions, classes and methods (`Class.method`) of a module."""
    names = set()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{member.name}"
                for member in node.body
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return names


BLOCKS = [
    (page, block)
    for page in PAGES
    for language, block in FENCE.findall(page.read_text(encoding="utf-8"))
    if language == "toml"
]


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[f"{page_id(page)}: {block[:30]!r}" for page, block in BLOCKS])
def test_every_config_in_a_page_loads(page: Path, block: str, tmp_path: Path) -> None:
    """Blocks of RL are pieces: they stand on the sections that every RL file has."""
    written = tomllib.loads(block)
    config_cls: type[SFTConfig | OfflineEvalConfig | RLConfig] = RLConfig
    if "reference" in written or isinstance(written.get("loss"), dict):
        config_cls = RewardModelConfig if "center_rewards_coefficient" in written.get("loss", {}) else DPOConfig
    elif written.keys() & {"data", "val", "eval", "distillation"}:
        config_cls = SFTConfig
    elif written.keys() & {"env", "num_examples"}:
        config_cls = OfflineEvalConfig
    base = tmp_path / "base.toml"
    base.write_text("[trainer]\n[orchestrator]\nrollouts_per_example = 8\n" if config_cls is RLConfig else "")
    assert set(written) <= load_config(config_cls, [base], written).model_fields_set


@every_page
def test_no_page_holds_an_unresolved_merge(page: Path) -> None:
    assert re.findall(r"^(?:<{7}|>{7}) .*$", page.read_text(encoding="utf-8"), re.MULTILINE) == []


def test_the_reference_of_commands_is_up_to_date() -> None:
    """Made by a process of its own, as a person makes it."""
    made = subprocess.run([sys.executable, COMMANDS_GENERATOR], capture_output=True, text=True, check=True).stdout
    advice = "run: uv run python docs/generate/commands.py > docs/commands.md"
    assert (ROOT / "docs" / "commands.md").read_text(encoding="utf-8") == made, advice


def test_the_page_of_the_command_line_names_every_command() -> None:
    commands = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    named = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [name for name in re.findall(r"^### (.*)", commands, re.MULTILINE) if f"`{name} " not in named] == []
