"""Nothing of a former run in the same directory is taken for the new one's, and nothing of worth is lost."""

import os
from pathlib import Path

import pytest

from prime_rl.configs.ranges import AUTO, LATEST
from prime_rl.configs.shared import EarlyStopConfig
from prime_rl.run.checkpoints import End
from prime_rl.run.directory import RunFinished, check_run_dir, prepare_run_dir
from prime_rl.run.early_stop import EarlyEnd, History
from prime_rl.run.paths import RunPaths
from prime_rl.utils.errors import RunDirError
from prime_rl.utils.files import STABLE


def fill(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / name / STABLE).touch()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run of which every part has gone on to step 3."""
    paths = RunPaths(tmp_path / "out")
    steps = ("step_1", "step_2", "step_3")
    for directory in (paths.weights, paths.orchestrator.broadcasts, paths.orchestrator.rollouts, paths.rollouts):
        fill(directory, *steps)
    fill(paths.orchestrator.broadcasts, "step_4.partial")
    paths.orchestrator.control.mkdir()
    (paths.orchestrator.control / "evicted.txt").touch()
    paths.metrics.write_text("old\n")
    return paths


def test_a_fresh_run_finds_no_old_batches_policies_or_orders(paths: RunPaths) -> None:
    prepare_run_dir(paths, None)
    assert names(paths.orchestrator.rollouts) == names(paths.orchestrator.broadcasts) == []
    assert not paths.rollouts.exists()
    assert not paths.orchestrator.control.exists()


def test_a_fresh_run_keeps_old_weights_and_sets_old_metrics_aside(paths: RunPaths) -> None:
    (paths.root / "metrics.1.jsonl").write_text("older\n")
    prepare_run_dir(paths, None)
    assert names(paths.weights) == ["step_1", "step_2", "step_3"]
    assert not paths.metrics.exists()
    assert (paths.root / "metrics.1.jsonl").read_text() == "older\n"
    assert (paths.root / "metrics.2.jsonl").read_text() == "old\n"


def test_what_was_saved_after_the_resumed_step_is_replaced_so_that_nothing_combines_two_attempts(
    paths: RunPaths,
) -> None:
    both = (paths.checkpoints, paths.orchestrator.checkpoints, paths.weights)
    for attempt in ("first", "second"):
        for checkpoints in both:
            fill(checkpoints, "step_1", "step_2", "step_3", "step_10")
            (checkpoints / "step_3" / attempt).touch()
        prepare_run_dir(paths, 2)
        for checkpoints in both:
            assert names(checkpoints) == ["replaced", "step_1", "step_2"]
            assert names(checkpoints / "replaced") == ["step_10", "step_3"]
            assert (checkpoints / "replaced" / "step_3" / attempt).exists()
    assert check_run_dir(paths, LATEST) == 2


def test_a_resumed_run_keeps_the_policy_it_starts_from_and_appends_to_the_metrics(paths: RunPaths) -> None:
    prepare_run_dir(paths, 2)
    assert names(paths.orchestrator.broadcasts) == ["step_1", "step_2"]
    assert names(paths.orchestrator.rollouts) == ["step_1"]
    assert paths.metrics.read_text() == "old\n"


def test_a_policy_that_was_published_after_its_checkpoint_belongs_to_another_attempt(paths: RunPaths) -> None:
    """A run went on from step 1 and died before it saved step 2; now somebody resumes the first attempt's step 2."""
    fill(paths.checkpoints, "step_1", "step_2")
    published = paths.orchestrator.broadcast(2) / STABLE
    for saved_after_s, left in ((1, ["step_1", "step_2"]), (-1, ["step_1"])):
        seconds = published.stat().st_mtime + saved_after_s
        os.utime(paths.checkpoint(2) / STABLE, (seconds, seconds))
        prepare_run_dir(paths, 2)
        assert names(paths.orchestrator.broadcasts) == left


def test_a_fresh_run_does_not_start_among_checkpoints(paths: RunPaths) -> None:
    fill(paths.checkpoints, "step_2")
    with pytest.raises(RunDirError):
        check_run_dir(paths, None)
    assert check_run_dir(paths, None, clean=True) is None


def test_a_save_that_did_not_end_is_no_other_runs_checkpoint(paths: RunPaths) -> None:
    fill(paths.checkpoints, "step_2.partial")
    assert check_run_dir(paths, None) is None


def test_a_finished_run_is_refused_and_auto_leaves_it_at_that(paths: RunPaths) -> None:
    fill(paths.checkpoints, "step_2", "step_4")
    fill(paths.orchestrator.checkpoints, "step_2", "step_4")
    assert check_run_dir(paths, LATEST, end=End(4)) == 4, "its parts may have work left"
    for part in ("trainer", "orchestrator"):
        paths.completion(part).parent.mkdir(exist_ok=True)
        paths.completion(part).touch()
    for step in (LATEST, 4):
        with pytest.raises(RunDirError, match=r"is finished: its last checkpoint is step 4, .* raise max_steps"):
            check_run_dir(paths, step, end=End(4))
    with pytest.raises(RunFinished, match="nothing left to do"):
        check_run_dir(paths, AUTO, end=End(4))
    assert check_run_dir(paths, AUTO, end=End(5)) == 4
    assert check_run_dir(paths, 2, end=End(4)) == 2


def test_a_run_that_ended_early_is_finished_until_its_rule_changes(paths: RunPaths) -> None:
    fill(paths.checkpoints, "step_2", "step_4")
    paths.completion("trainer").parent.mkdir(exist_ok=True)
    paths.completion("trainer").touch()
    history = History(evaluations=[(2, 1.0), (3, 1.5), (4, 2.0)])
    EarlyEnd(4, "the loss rose", history).write(paths.early_end)
    end = End(10, early_stop=EarlyStopConfig(patience=2))
    refusal = r"step 4, and it ended early: val/loss did not improve .*; change or remove \[early_stop\] to continue it"
    with pytest.raises(RunDirError, match=refusal):
        check_run_dir(paths, LATEST, end=end)
    with pytest.raises(RunFinished, match=r"ended early: val/loss did not improve .*; there is nothing left to do"):
        check_run_dir(paths, AUTO, end=end)
    assert check_run_dir(paths, 2, end=end) == 2
    assert check_run_dir(paths, AUTO, end=End(10, early_stop=EarlyStopConfig(patience=3))) == 4
    assert check_run_dir(paths, AUTO, end=End(10)) == 4
    prepare_run_dir(paths, 4)
    assert not paths.early_end.exists(), "a run that continues has not ended"


def test_the_best_step_alone_is_no_checkpoint_of_another_run(paths: RunPaths) -> None:
    paths.checkpoints.mkdir()
    paths.best_checkpoint.write_text('{"step": 2}')
    assert check_run_dir(paths, AUTO) is None


def test_a_run_of_epochs_is_finished_after_as_many(paths: RunPaths) -> None:
    """Only the trainer knows how many steps they take: its marker tells that it has made them."""
    fill(paths.checkpoints, "step_2", "step_4")
    for step in (2, 4):
        paths.saved_config(step, "sft").parent.mkdir()
        paths.saved_config(step, "sft").write_text("num_epochs = 2.0\n")
    assert check_run_dir(paths, LATEST, end=End(num_epochs=2)) == 4, "the trainer may have weights to export"
    paths.completion("trainer").parent.mkdir(exist_ok=True)
    paths.completion("trainer").touch()
    for epochs in (1, 2):
        with pytest.raises(RunDirError, match=rf"step 4, and num_epochs = {epochs}; raise num_epochs to continue it"):
            check_run_dir(paths, LATEST, end=End(num_epochs=epochs))
    with pytest.raises(RunFinished, match="nothing left to do"):
        check_run_dir(paths, AUTO, end=End(num_epochs=2))
    assert check_run_dir(paths, AUTO, end=End(num_epochs=2.5)) == 4
    assert check_run_dir(paths, 2, end=End(num_epochs=2)) == 2, "an earlier step has work left"
    for damaged in ("num_epochs = 2.0 2", "num_epochs = true", ""):
        paths.saved_config(4, "sft").write_text(damaged)
        assert check_run_dir(paths, AUTO, end=End(num_epochs=2)) == 4, "the trainer finds out"


def test_cleaning_removes_the_run_but_not_what_its_batch_job_stands_on(paths: RunPaths) -> None:
    fill(paths.root, "configs", "slurm", "logs")
    (paths.root / "latest").symlink_to(paths.weights)
    prepare_run_dir(paths, None, clean=True)
    assert names(paths.root) == ["configs", "slurm"]


def test_nothing_is_cleaned_under_a_run_that_resumes(paths: RunPaths) -> None:
    fill(paths.checkpoints, "step_2")
    prepare_run_dir(paths, 2, clean=True)
    assert names(paths.checkpoints) == ["step_2"]


def test_an_environment_variable_forbids_all_cleaning(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEVER_CLEAN_OUTPUT_DIR", "1")
    prepare_run_dir(paths, None, clean=True)
    assert names(paths.weights) == ["step_1", "step_2", "step_3"]
    fill(paths.checkpoints, "step_2")
    with pytest.raises(RunDirError):
        check_run_dir(paths, None, clean=True)


def test_a_directory_that_is_no_run_is_not_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").touch()
    with pytest.raises(RunDirError, match="does not look like the directory of a run"):
        check_run_dir(RunPaths(tmp_path / "data"), None, clean=True)
    fill(tmp_path, "logs")
    monkeypatch.chdir(tmp_path / "data")
    with pytest.raises(RunDirError):
        check_run_dir(RunPaths(tmp_path), None, clean=True)
