"""The list of installed environments: what configs find by id, and what is said when files are gone."""

from __future__ import annotations

import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from prime_rl.checks.packages import environment_faults
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.rollouts.environments import EnvConfig
from prime_rl.configs.shared import LogConfig
from prime_rl.interpreters import DIRECTORY_VARIABLE, InstalledEnvironment, Registry, environments_directory
from prime_rl.orchestrator.workers.loading import load_environments
from prime_rl.utils.errors import UserError

MODULE = """
import verifiers as vf
from datasets import Dataset

def load_environment():
    rows = Dataset.from_list([{"question": "a", "answer": "a"}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[lambda completion: 1.0]))
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "installed"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return Registry()


@pytest.fixture
def letters(registry: Registry) -> InstalledEnvironment:
    place = registry.directory / "letters"
    place.mkdir(parents=True)
    (place / "found_letters.py").write_text(MODULE)
    file = str(place / "found_letters.py")
    return InstalledEnvironment("found-letters", "found_letters", "1.0", "0.1.14", "./letters", str(place), False, file)


def faults(env_id: str) -> list[str]:
    return list(environment_faults("env", [EnvConfig(id=env_id)], StartDir()))


def test_an_installed_environment_is_found_by_any_form_of_its_id(
    registry: Registry, letters: InstalledEnvironment
) -> None:
    (missing,) = faults("found-letters")
    assert "`medarc_train env install PATH`" in missing
    assert registry.add(letters) is None
    assert stat.S_IMODE(registry.file.stat().st_mode) == 0o600
    for env_id in ("found-letters", "found-letters@1.0", "owner/found-letters"):
        assert registry.find(env_id) == letters
        assert faults(env_id) == []
    loaded = load_environments([EnvConfig(id="found-letters")], LogConfig(vf_level="warning"))
    assert len(loaded["found-letters"]) == 1


def test_another_install_replaces_the_entry(registry: Registry, letters: InstalledEnvironment) -> None:
    registry.add(letters)
    newer = replace(letters, version="2.0")
    assert registry.add(newer) == letters
    assert registry.all() == [newer]
    registry.remove(newer)
    assert registry.all() == []


def test_files_that_are_gone_are_a_fault_that_says_what_to_do(
    registry: Registry, letters: InstalledEnvironment
) -> None:
    registry.add(letters)
    Path(letters.file).unlink()
    (fault,) = faults("found-letters")
    assert "are gone: run `medarc_train env install ./letters` again" in fault


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "environments": [{"id": 1}]}'])
def test_a_damaged_list_is_one_line(registry: Registry, text: str) -> None:
    registry.directory.mkdir(parents=True)
    registry.file.write_text(text)
    with pytest.raises(UserError, match="is damaged: delete it, and install the environments again"):
        registry.all()
    assert faults("found-letters") == [
        f"env[0].id = 'found-letters': {registry.file} is damaged: delete it, and install the environments again"
    ]


def test_the_directory_is_the_users() -> None:
    home = {"XDG_DATA_HOME": "/data"}
    assert environments_directory(home) == Path("/data/medarc-rl/environments")
    assert environments_directory({**home, DIRECTORY_VARIABLE: "/mine"}) == Path("/mine")
