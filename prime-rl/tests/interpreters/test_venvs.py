"""Interpreters of projects: uv makes each once, whole or not at all, and another one for other contents."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prime_rl.checks.packages import environment_faults
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.rollouts.environments import EnvConfig
from prime_rl.interpreters import KEPT_DAYS, VENVS_VARIABLE, place_of_project, python_of, venv_of_project
from prime_rl.utils.errors import RunError

pytestmark = pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")

PROJECT = """
[project]
name = "letters"
version = "1"
dependencies = {dependencies}

[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""

BACKEND = """
import pathlib, zipfile

HERE = pathlib.Path(__file__).parent

def build_editable(directory, config_settings=None, metadata_directory=None):
    requires = [line for line in (HERE / "requires.txt").read_text().splitlines() if line]
    metadata = ["Metadata-Version: 2.1", "Name: letters", "Version: 1"]
    metadata += ["Requires-Dist: " + name for name in requires]
    wheel = "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    files = {"letters.pth": str(HERE), "letters-1.dist-info/METADATA": "\\n".join(metadata) + "\\n",
             "letters-1.dist-info/WHEEL": wheel}
    record = "".join(name + ",,\\n" for name in [*files, "letters-1.dist-info/RECORD"])
    with zipfile.ZipFile(pathlib.Path(directory) / "letters-1-py3-none-any.whl", "w") as out:
        for name, text in [*files.items(), ("letters-1.dist-info/RECORD", record)]:
            out.writestr(name, text)
    return "letters-1-py3-none-any.whl"

build_wheel = build_editable
"""
"""Builds the project without a package from an index."""


def write(project: Path, *dependencies: str) -> Path:
    project.mkdir(exist_ok=True)
    (project / "pyproject.toml").write_text(PROJECT.format(dependencies=list(dependencies)))
    (project / "requires.txt").write_text("\n".join(dependencies))
    (project / "backend.py").write_text(BACKEND)
    (project / "letters.py").write_text("ALPHABET = 'abc'\n")
    return project


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write(tmp_path / "letters")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VENVS_VARIABLE, str(tmp_path / "venvs"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    return tmp_path / "venvs"


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_a_project_gets_an_interpreter_that_has_it(project: Path) -> None:
    said: list[str] = []
    venv = venv_of_project(project, said.append)
    assert venv == place_of_project(project)
    program = "import letters, sys; print(letters.ALPHABET, sys.prefix)"
    shown = subprocess.run([python_of(venv), "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["abc", str(venv)]
    assert said[0] == f"Making an interpreter in {venv}"
    assert said[1].startswith(f"Made {venv} in ")
    # Its code may change without a new one.
    (project / "letters.py").write_text("ALPHABET = 'xyz'\n")
    assert venv_of_project(project, said.append) == venv
    assert len(said) == 2
    assert (
        subprocess.run([python_of(venv), "-c", program], capture_output=True, text=True, check=True).stdout[:3] == "xyz"
    )


def test_other_contents_make_another_interpreter(project: Path) -> None:
    first = place_of_project(project)
    (project / "pyproject.toml").write_text((project / "pyproject.toml").read_text() + "\n")
    second = place_of_project(project)
    (project / "uv.lock").write_text("version = 1\n")
    assert len({first, second, place_of_project(project)}) == 3


def test_an_old_interpreter_goes_when_the_next_is_made_unless_a_process_uses_it(project: Path, cache: Path) -> None:
    old, used, new = cache / "old-1", cache / "used-1", cache / "new-1"
    cache.mkdir(mode=0o700)
    last_used_s = time.time() - (KEPT_DAYS + 1) * 86_400
    for venv in (old, used, new, cache / "notes"):
        (venv / "bin").mkdir(parents=True)
        if venv.name != "notes":
            python_of(venv).touch()
        if venv is not new:
            os.utime(venv, (last_used_s, last_used_s))
    lock = os.open(used, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    os.utime(used, (last_used_s, last_used_s))
    said: list[str] = []
    venv = venv_of_project(project, said.append)
    os.close(lock)
    assert names(cache) == sorted([venv.name, "new-1", "notes", "used-1"])
    assert said[-1] == f"Removed {old}, which no run has used for {KEPT_DAYS} days"


def test_many_that_want_the_same_make_it_once(project: Path, cache: Path) -> None:
    said: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: venv_of_project(project, said.append), range(4)))
    assert len(set(made)) == 1
    assert len([line for line in said if line.startswith("Made ")]) == 1
    assert names(cache) == [made[0].name]


def test_what_cannot_be_installed_is_one_line_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    project = write(tmp_path / "letters", "no-such-package-of-ours==1")
    (fault,) = environment_faults("env", [EnvConfig(id="letters", project=project)], StartDir())
    assert fault.startswith(f"env[0]: project = {str(project)!r}: `uv pip install` fails: No solution found")
    assert "no-such-package-of-ours" in fault
    assert "\n" not in fault
    assert names(cache) == []


def test_a_lock_file_that_does_not_fit_is_refused(project: Path, cache: Path) -> None:
    (project / "uv.lock").write_text("not a lock file\n")
    with pytest.raises(RunError, match=r"`uv sync` fails: .*uv\.lock"):
        venv_of_project(project, print)
    assert names(cache) == []


def test_no_project_and_no_uv_are_named(tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"has no pyproject\.toml"):
        venv_of_project(tmp_path / "absent")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="needs uv, which is not installed"):
        venv_of_project(project)


def test_a_made_interpreter_needs_verifiers_and_the_module(project: Path) -> None:
    (fault,) = environment_faults("env", [EnvConfig(id="other", project=project)], StartDir())
    assert "has no module named 'verifiers' and 'other'" in fault


@pytest.mark.parametrize("other", [{"python": sys.executable}, {"address": "tcp://127.0.0.1:5000"}])
def test_a_project_excludes_an_interpreter_and_an_address(other: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        EnvConfig(project=".", **other)
