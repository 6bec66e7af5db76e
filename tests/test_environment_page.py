"""docs/environments.md: the environment on the page passes its own tests, its preflight, and trains."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
FILE = re.compile(r"^`([\w./]+)`[^\n]*:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
INSTALL, TEST, PREFLIGHT, RUN = re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1].splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page, in a folder from which the examples can be reached."""
    folder = tmp_path_factory.mktemp("environment")
    for name, text in FILE.findall(PAGE):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def run(command: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run a line of the page. Its module is found by path, as an editable install would have it."""
    program, *words = shlex.split(command.removeprefix("uv run "))
    env = {**os.environ, "PYTHONPATH": str(folder / shlex.split(INSTALL)[-1])}
    words = [str(Path(sys.executable).with_name(program)), *words, *more]
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_the_page_has_a_module_a_package_a_test_and_a_config(folder: Path) -> None:
    assert len(FILE.findall(PAGE)) == 4
    assert INSTALL == "uv pip install -e environments/abbreviations"


def test_the_environments_own_tests_pass(folder: Path) -> None:
    done = run(TEST, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_preflight_prints_what_the_page_shows(folder: Path) -> None:
    done = run(PREFLIGHT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() in PAGE


@pytest.mark.slow
def test_it_trains(folder: Path) -> None:
    done = run(RUN, folder, "--max-steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = (folder / "outputs" / "abbreviations" / "metrics.jsonl").read_text(encoding="utf-8")
    assert '"reward_parts/right"' in metrics
