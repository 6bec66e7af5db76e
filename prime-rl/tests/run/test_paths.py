from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.run.directory import check_output_dir
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.utils.errors import RunDirError
from prime_rl.utils.files import STABLE, replacing_directory, replacing_file


def test_a_directory_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "step_3"
    with replacing_directory(target) as scratch:
        (scratch / "weights").write_text("new")
        assert not target.exists()
    assert (target / "weights").read_text() == "new"
    assert (target / STABLE).is_file()


def test_a_failed_write_leaves_the_former_directory(tmp_path: Path) -> None:
    target = tmp_path / "step_3"
    with replacing_directory(target) as scratch:
        (scratch / "weights").write_text("old")
    with pytest.raises(OSError, match="disk full"), replacing_directory(target) as scratch:
        raise OSError("disk full")
    assert (target / "weights").read_text() == "old"
    assert stable_steps(tmp_path) == [3]


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    def write() -> None:
        with replacing_file(tmp_path / "batch.bin") as scratch:
            scratch.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_only_complete_steps_count_and_they_come_in_order(tmp_path: Path) -> None:
    for name in ("step_10", "step_9", "step_11", "step_x", "other"):
        (tmp_path / name).mkdir()
    for name in ("step_10", "step_9", "other"):
        (tmp_path / name / STABLE).touch()
    assert stable_steps(tmp_path) == [9, 10]


def test_a_fresh_run_does_not_start_on_another_ones_checkpoints(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    check_output_dir(paths, resuming=False)
    paths.checkpoint(4).mkdir(parents=True)
    check_output_dir(paths, resuming=True)
    with pytest.raises(RunDirError, match="--resume latest"):
        check_output_dir(paths, resuming=False)


def test_the_orchestrator_finds_its_run(tmp_path: Path) -> None:
    assert RunPaths.from_orchestrator_dir(tmp_path / "run_default").metrics == tmp_path / "metrics.jsonl"
    assert RunPaths.from_orchestrator_dir(tmp_path / "alone").metrics == tmp_path / "alone" / "metrics.jsonl"
