"""Every extra of the project resolves, alone and with all others, and flash-attn builds against the pinned torch.

uv works on a copy of the project with an environment of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = sorted(PROJECT["project"]["optional-dependencies"])
MEMBERS = (".", *PROJECT["tool"]["uv"]["workspace"]["members"])

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that uv reads, locked."""
    copy = tmp_path_factory.mktemp("project")
    for member in MEMBERS:
        shutil.copytree(ROOT / member, copy / member, ignore=ignored, dirs_exist_ok=True)
    run(copy, "lock")
    return copy


def ignored(folder: str, names: list[str]) -> set[str]:
    """Only Python code and what describes packages is copied."""
    kept = (".py", ".toml", ".md", ".j2", "LICENSE")
    hidden = {name for name in names if name.startswith(".") or name in ("docs", "tests", "benchmarks", "outputs")}
    return hidden | {name for name in names if (Path(folder) / name).is_file() and not name.endswith(kept)}


def run(project: Path, *words: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    env |= {"UV_PROJECT_ENVIRONMENT": str(project / "environment"), "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    if "PIP_FIND_LINKS" in env:
        env.setdefault("UV_FIND_LINKS", env["PIP_FIND_LINKS"])
    done = subprocess.run(["uv", *words], cwd=project, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_each_extra_alone_and_all_together_can_be_synced(project: Path) -> None:
    for words in (*(("--extra", extra) for extra in EXTRAS), ("--all-extras",)):
        planned = run(project, "sync", "--frozen", "--dry-run", *words)
        assert " + torch==" in planned, words


def test_flash_attention_is_built_against_the_pinned_torch(project: Path) -> None:
    """By uv's rule for packages without build isolation: they come last, and see the environment's own torch."""
    assert "flash-attn" in PROJECT["tool"]["uv"]["no-build-isolation-package"]
    locked = tomllib.loads((project / "uv.lock").read_text(encoding="utf-8"))["package"]
    (torch,) = {each["version"].partition("+")[0] for each in locked if each["name"] == "torch"}
    engine = tomllib.loads((ROOT / "prime-rl" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch=={torch}" in engine["dependencies"]
    names = {word.partition("=")[0] for word in engine["optional-dependencies"]["flash-attn"]}
    assert names >= {"flash-attn", "ninja", "packaging", "psutil", "setuptools"}
