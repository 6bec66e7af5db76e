"""What a killed run was writing: whole or gone at the next start."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from prime_rl.run.directory import settle
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.utils.files import remove_directory, replacing_directory, replacing_file


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "out")


def parents(paths: RunPaths) -> list[Path]:
    return [paths.checkpoints, paths.weights, paths.orchestrator.checkpoints, paths.orchestrator.broadcasts]


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def test_half_written_directories_go_and_whole_ones_stay(paths: RunPaths) -> None:
    for parent in parents(paths):
        with replacing_directory(parent / "step_1") as scratch:
            (scratch / "file").write_text("whole")
        (parent / "step_2.partial").mkdir()
        (parent / "step_2.partial" / "file").write_text("half")
    settle(paths)
    assert [names(parent) for parent in parents(paths)] == [["step_1"]] * 4


def test_a_directory_that_was_complete_but_for_its_name_gets_it(paths: RunPaths) -> None:
    """Also when the old one of that name was deleted already."""
    with replacing_directory(paths.checkpoint(3)) as scratch:
        (scratch / "file").write_text("new")
    paths.checkpoint(3).rename(scratch)
    assert stable_steps(paths.checkpoints) == []
    settle(paths)
    assert stable_steps(paths.checkpoints) == [3]
    assert (paths.checkpoint(3) / "file").read_text() == "new"


def test_a_directory_whose_marker_names_missing_files_is_not_whole(paths: RunPaths) -> None:
    with replacing_directory(paths.checkpoint(3)) as scratch:
        (scratch / "file").write_text("new")
    paths.checkpoint(3).rename(paths.checkpoints / "step_3.partial")
    (paths.checkpoints / "step_3.partial" / "file").unlink()
    settle(paths)
    assert names(paths.checkpoints) == []


def test_no_half_of_a_deleted_directory_has_its_name(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    with replacing_directory(paths.checkpoint(1)) as scratch:
        (scratch / "file").write_text("old")
    # Stands in for a process that is killed while it deletes.
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)
        remove_directory(paths.checkpoint(1))
    assert names(paths.checkpoints) == ["step_1.deleted"]
    settle(paths)
    assert names(paths.checkpoints) == []


def test_half_written_files_go(paths: RunPaths) -> None:
    run = paths.orchestrator
    targets = [
        paths.config("sft"),
        paths.best_checkpoint,
        run.resolved_config,
        run.step_samples(2),
        paths.root / "eval" / "summary.json",
    ]
    for target in targets:
        with replacing_file(target) as scratch:
            scratch.write_text("whole")
        scratch.write_text("half")
    settle(paths)
    assert sorted(path for path in paths.root.rglob("*") if path.is_file()) == sorted(targets)
    assert not list(paths.root.rglob("*.tmp"))


def test_a_new_directory_stays_as_it_is(paths: RunPaths) -> None:
    settle(paths)
    assert not paths.root.exists()
