"""docs/environments.md: its commands make an environment, install it, check it, try it, and train."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
NEW, INSTALL, TEST, CHECK, TRY, RUN = re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1].splitlines()
SHOWN = re.search(r"```\n(ok    import.*?)```", PAGE, re.DOTALL)[1].splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the repository's, with the same settings of pytest, after the first two commands."""
    folder = tmp_path_factory.mktemp("environment")
    (folder / "examples").symlink_to(ROOT / "examples")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for line in (NEW, INSTALL):
        done = run(line, folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run(command: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run a line of the page."""
    program, *words = shlex.split(command.removeprefix("uv run "))
    env = {**os.environ, "MEDARC_ENVIRONMENTS_DIR": str(folder / "installed")}
    words = [str(Path(sys.executable).with_name(program)), *words, *more]
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_the_files_are_those_of_the_page_and_pass_their_tests(folder: Path) -> None:
    named = re.findall(r"^\| `(environments/dosing/[\w.]+)` \|", PAGE, re.MULTILINE)
    made = [path.relative_to(folder).as_posix() for path in (folder / "environments" / "dosing").iterdir()]
    assert sorted(named) == sorted(path for path in made if not path.endswith("__pycache__"))
    done = run(TEST, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_check_prints_what_the_page_shows(folder: Path) -> None:
    done = run(CHECK, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout.splitlines()
    assert [line for line in SHOWN[1:] if line not in printed] == []
    # A slow machine makes the time a warning.
    assert [line for line in printed if line.startswith(("warn", "fail")) and line.split()[1] != "time:"] == []


def test_a_model_is_shown(folder: Path) -> None:
    done = run(TRY, folder, "--html", "page.html")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("A tablet has") == 3
    assert re.search(r"right [01]\b.*is_number [01]\b", done.stdout)
    assert "3 rollouts, mean reward" in done.stdout
    assert (folder / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.slow
def test_it_trains(folder: Path) -> None:
    done = run(RUN, folder, "--max-steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = (folder / "outputs" / "dosing" / "metrics.jsonl").read_text(encoding="utf-8")
    assert '"reward_parts/right"' in metrics
