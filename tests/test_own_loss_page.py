"""docs/own_loss.md: its two files train, and a mistake in them is the same line in a dry run, a check and a run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "own_loss.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return next(text for of, text in blocks if of == language)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "my_rl.py").write_text(block("python"), encoding="utf-8")
    (tmp_path / "own.toml").write_text(block("toml"), encoding="utf-8")
    return tmp_path


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the page's command."""
    program, *words = shlex.split(block("bash").removeprefix("uv run "))
    words = [str(Path(sys.executable).with_name(program)), *words, *more]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


def test_the_two_files_train(folder: Path) -> None:
    done = run(folder, "--max-steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / "outputs/own-loss/metrics.jsonl").read_text().splitlines()]
    assert any("outside_clip/mean" in row for row in rows)


def test_a_mistake_is_the_same_line_in_a_dry_run_a_check_and_a_run(folder: Path) -> None:
    file = folder / "my_rl.py"
    file.write_text(file.read_text().replace("losses.mean()", "losses").replace(" + eps", ""))
    shown = [line for line in block("").splitlines() if line.startswith("error: ")]
    assert len(shown) == 2
    dry, check = run(folder, "--dry-run"), run(folder, "--preflight")
    assert dry.returncode == 2
    assert check.returncode == 1
    for done in (dry, check):
        for line in shown:
            assert re.sub(r"\[[^\]]*\]", "[]", line) in re.sub(r"\[[^\]]*\]", "[]", done.stderr + done.stdout)
    done = run(folder)
    assert done.returncode == 1
    said = done.stderr + done.stdout
    assert "its loss has the shape [3]" in said or "returned [nan" in said
    assert "Traceback" not in said
