"""A run continues from the newest checkpoint that all of its parts have whole, and says why not from a newer one."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.configs.ranges import AUTO, LATEST
from prime_rl.run.checkpoints import SavedSteps
from prime_rl.run.paths import RunPaths
from prime_rl.utils.errors import RunDirError
from prime_rl.utils.files import STABLE, replacing_directory, scratch_of


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "out")


def save_trainer(paths: RunPaths, *steps: int) -> None:
    for step in steps:
        with replacing_directory(paths.checkpoint(step)) as scratch:
            (scratch / "trainer").mkdir()
            (scratch / "trainer" / "rank_0.pt").write_bytes(b"state")


def save_both(paths: RunPaths, *steps: int) -> None:
    save_trainer(paths, *steps)
    for step in steps:
        with replacing_directory(paths.orchestrator.checkpoint(step).parent) as scratch:
            (scratch / "orchestrator").mkdir()
            (scratch / "orchestrator" / "progress.json").write_text("{}")
            (scratch / "orchestrator" / "buffer.json").write_text("{}")


def choose(paths: RunPaths, step: int) -> tuple[int | None, tuple[str, ...]]:
    point = SavedSteps.of(paths).choose(step)
    return point.step, point.passed_over


def test_latest_of_an_sft_run_is_the_trainers_newest(paths: RunPaths) -> None:
    save_trainer(paths, 2, 10)
    assert choose(paths, LATEST) == (10, ())


def test_latest_is_the_newest_step_that_trainer_and_orchestrator_both_have(paths: RunPaths) -> None:
    save_both(paths, 2, 4)
    save_trainer(paths, 6)
    step, passed_over = choose(paths, LATEST)
    assert step == 4
    assert passed_over == (
        f"the trainer's step 6 has no matching checkpoint of the orchestrator, {paths.orchestrator.checkpoint(6)}",
    )


def test_a_save_that_did_not_end_and_one_without_its_marker_are_passed_over_by_name(paths: RunPaths) -> None:
    save_trainer(paths, 2, 4)
    (paths.checkpoint(4) / STABLE).unlink()
    scratch_of(paths.checkpoint(6)).mkdir()
    step, passed_over = choose(paths, AUTO)
    assert step == 2
    assert passed_over == (
        f"{paths.checkpoint(6)} was still being written when the run ended",
        f"{paths.checkpoint(4)} is not complete: it has no file STABLE",
    )


@pytest.mark.parametrize(
    "name", ["trainer/rank_0.pt", "../../run_default/checkpoints/step_4/orchestrator/progress.json", "STABLE"]
)
@pytest.mark.parametrize("damage", ["cut", "emptied", "deleted", "more"])
def test_a_damaged_file_of_either_part_is_named_and_the_step_before_is_taken(
    paths: RunPaths, name: str, damage: str
) -> None:
    save_both(paths, 2, 4)
    file = (paths.checkpoint(4) / name).resolve()
    whole = file.read_bytes()
    if damage == "deleted":
        file.unlink()
    else:
        file.write_bytes({"cut": whole[:-1], "emptied": b"", "more": whole + b"x"}[damage])
    if (name, damage) == ("STABLE", "emptied"):  # as older versions wrote it: there is nothing to compare
        assert choose(paths, LATEST) == (4, ())
        assert SavedSteps.of(paths).unchecked(4) == [file]
        return
    assert SavedSteps.of(paths).unchecked(2) == []
    step, (fault,) = choose(paths, LATEST)
    assert step == 2
    assert str(file if damage != "deleted" else file.name) in fault
    with pytest.raises(RunDirError, match="2"):
        choose(paths, 4)


def test_a_step_that_is_not_there_is_refused_with_the_nearest_one_that_is(paths: RunPaths) -> None:
    save_trainer(paths, 2, 4, 10)
    (paths.checkpoint(4) / "trainer" / "rank_0.pt").unlink()
    assert choose(paths, 2) == (2, ())
    for asked, nearest in ((3, 2), (5, 2), (7, 10), (11, 10)):
        with pytest.raises(RunDirError, match=rf"step_{asked} .*complete steps: 2, 4, 10\); .* --resume {nearest}$"):
            choose(paths, asked)


def test_with_nothing_saved_latest_is_refused_and_auto_starts_a_new_run(paths: RunPaths) -> None:
    with pytest.raises(RunDirError, match=r"nothing to resume: .* start a new run without --resume"):
        choose(paths, LATEST)
    with pytest.raises(RunDirError, match=r"complete steps: none\)$"):
        choose(paths, 3)
    assert choose(paths, AUTO) == (None, ())
    scratch_of(paths.checkpoint(1)).mkdir(parents=True)
    assert choose(paths, AUTO) == (None, ()), "the first save did not end"


def test_auto_does_not_start_over_when_every_checkpoint_is_damaged(paths: RunPaths) -> None:
    save_trainer(paths, 2, 4)
    for step in (2, 4):
        (paths.trainer_checkpoint(step) / "rank_0.pt").write_bytes(b"")
    for asked in (LATEST, AUTO):
        with pytest.raises(RunDirError, match=r"no checkpoint .* can be resumed: .*step_4.*; .*step_2"):
            choose(paths, asked)
