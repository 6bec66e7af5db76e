"""The documents name what exists: paths, links, anchors and definitions; their configs load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.rl import RLConfig
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
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
PATH = re.compile(r"(?:\.\./)*[\w.-]+(?:/[\w.-]+)*/?")
REPOSITORY_PATH = re.compile(r"(?<![\w./~-])(?:\.ci|benchmarks|docs|examples|medarc_rl|prime-rl)/[\w./-]*\w")

MADE_BY_A_RUN = ("OUT/", "RUN/", "outputs/", "environments/dosing/")
"""Beginnings of paths that a run writes, or that tests/test_environment_page.py takes from a page. Pages use the first
ones for everything in a run's directory."""


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


@every_page
def test_every_relative_link_in_a_page_leads_somewhere(page: Path) -> None:
    broken = []
    for target, image in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        address = target or image
        if address.startswith(("http://", "https://")):
            continue
        path, _, anchor = address.partition("#")
        linked = page.parent / path if path else page
        if not linked.exists() or (anchor and anchor not in anchors_of(linked)):
            broken.append(address)
    assert broken == []


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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
    if written.keys() & {"data", "val", "eval"}:
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


def test_the_site_has_every_page_in_its_menu() -> None:
    """The menu is `nav` in mkdocs.yml. Pages outside docs/ have the names that docs/site.py gives them."""
    menu = set(pages_of(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)["nav"]))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    outside = [page.parent for room in ("examples", "benchmarks") for page in (ROOT / room).glob("*/README.md")]
    pages |= {f"{folder.relative_to(ROOT).as_posix()}.md" for folder in outside}
    assert menu == pages | {"index.md", "agents.md", "changelog.md", "engine.md"}


def pages_of(menu: str | list | dict) -> Iterator[str]:
    if isinstance(menu, str):
        yield menu
    else:
        for entry in menu.values() if isinstance(menu, dict) else menu:
            yield from pages_of(entry)


def test_the_readme_has_at_most_600_words_and_one_table() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.split()) <= 600
    assert len(re.findall(r"^\|(?:-+\|)+$", text, re.MULTILINE)) == 1
