from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prime_rl.configs.orchestrator import CheckpointConfig, NCCLWeightBroadcastConfig, OrchestratorConfig
from prime_rl.configs.ranges import AUTO, LATEST
from prime_rl.orchestrator.ckpt import Checkpoints, Progress, remove_empty_broadcasts, remove_stale, restore
from prime_rl.orchestrator.errors import OrchestratorError
from prime_rl.orchestrator.run import weights_timeout_s
from prime_rl.run.early_stop import History
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.utils.contents import write_marker
from prime_rl.utils.files import begin_directory, complete_directory, replacing_directory


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    run = RunPaths(tmp_path)
    return Checkpoints(run, run.orchestrator)


def save_trainer(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        with replacing_directory(checkpoints.run.checkpoint(step)):
            pass


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(Progress(step, total_tokens=10 * step), {"draws": step})


def test_what_is_saved_comes_back(checkpoints: Checkpoints) -> None:
    saved = Progress(step=4, total_tokens=100, total_samples=20, total_problems=5)
    checkpoints.save(saved, {"draws": 7})
    assert restore(CheckpointConfig(), checkpoints, 4) == (saved, {"draws": 7})


def test_counters_and_buffer_can_be_left_out_and_evaluations_stay(checkpoints: Checkpoints) -> None:
    history = History("eval/x/mean", higher_is_better=True, evaluations=[(2, 0.5), (4, 0.25)], entropies=[1.0])
    checkpoints.save(Progress(4, 40, 8, 2, ledger_bytes=9, history=history, metrics_bytes=7), {"draws": 4})
    config = CheckpointConfig(skip_progress=True, skip_buffer=True)
    kept = Progress(step=4, ledger_bytes=9, history=history, metrics_bytes=7)
    assert restore(config, checkpoints, 4) == (kept, None)


def test_the_latest_step_is_the_trainers_latest_complete_one(checkpoints: Checkpoints) -> None:
    save(checkpoints, 0, 1, 2, 3)
    save_trainer(checkpoints, 1, 2)
    checkpoints.run.checkpoint(3).mkdir()
    assert checkpoints.resolve(-1) == 2
    assert checkpoints.resolve(1) == 1
    assert checkpoints.resolve(None) is None


def test_without_a_trainer_checkpoint_latest_is_refused_and_auto_starts_afresh(checkpoints: Checkpoints) -> None:
    save(checkpoints, 0, 1)
    assert checkpoints.resolve(AUTO) is None
    with pytest.raises(OrchestratorError, match="nothing to resume"):
        checkpoints.resolve(LATEST)


def test_a_step_without_our_part_is_refused_and_the_message_names_one_that_has_both(checkpoints: Checkpoints) -> None:
    save(checkpoints, 2)
    save_trainer(checkpoints, 2, 5)
    with pytest.raises(OrchestratorError, match=r"checkpoint of step 5 has no matching checkpoint .*: resume from 2"):
        checkpoints.resolve(5)
    assert checkpoints.resolve(LATEST) == 2


def test_an_unreadable_part_is_one_line(checkpoints: Checkpoints) -> None:
    save(checkpoints, 2)
    part = checkpoints.paths.checkpoint(2)
    (part / "progress.json").write_text("{")
    with pytest.raises(OrchestratorError, match=r"progress\.json has 1 bytes instead of the"):
        checkpoints.load(2)
    write_marker(part.parent, {})
    with pytest.raises(OrchestratorError, match="cannot read"):
        checkpoints.load(2)


def test_steps_that_the_trainer_passed_without_saving_are_removed(checkpoints: Checkpoints) -> None:
    save(checkpoints, *range(7))
    save_trainer(checkpoints, 2)
    checkpoints.prune(version=5, newest=6)
    assert stable_steps(checkpoints.paths.checkpoints) == [2, 4, 5, 6]


def test_a_step_that_the_trainer_still_writes_is_kept(checkpoints: Checkpoints) -> None:
    save(checkpoints, *range(7))
    begin_directory(checkpoints.run.checkpoint(2))
    checkpoints.prune(version=5, newest=6)
    assert stable_steps(checkpoints.paths.checkpoints) == [2, 4, 5, 6]
    complete_directory(checkpoints.run.checkpoint(2), {})
    assert checkpoints.resolve(LATEST) == 2


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (CheckpointConfig(interval=3), [3, 5, 6, 9, 12]),
        (CheckpointConfig(interval=3, keep_last=2), [5, 9, 12]),
        (CheckpointConfig(interval=3, keep_interval=6), [5, 6, 12]),
        (CheckpointConfig(interval=3, keep_last=1, keep_interval=6), [5, 6, 12]),
        (CheckpointConfig(keep_last=2), [5]),
    ],
)
def test_the_config_keeps_steps_of_its_own(checkpoints: Checkpoints, config: CheckpointConfig, kept: list[int]) -> None:
    """The trainer saved step 5, and may still save 13 and 14. An earlier continuation left step 15."""
    ours = replace(checkpoints, config=config)
    save(ours, *range(16))
    save_trainer(ours, 5)
    ours.prune(version=14, newest=14)
    assert stable_steps(ours.paths.checkpoints) == [*kept, 13, 14, 15]


async def test_weights_come_from_the_broadcast_or_else_from_the_export(checkpoints: Checkpoints) -> None:
    with replacing_directory(checkpoints.run.weight(3)):
        pass
    assert await checkpoints.await_weights(3, timeout_s=0) == checkpoints.run.weight(3)
    with replacing_directory(checkpoints.paths.broadcast(3)):
        pass
    assert await checkpoints.await_weights(3, timeout_s=0) == checkpoints.paths.broadcast(3)


async def test_weights_that_do_not_appear_are_one_line_with_both_places(checkpoints: Checkpoints) -> None:
    with pytest.raises(
        OrchestratorError,
        match=r"waited for the weights of version 3 in .*broadcasts/step_3 or in .*weights/step_3 since",
    ):
        await checkpoints.await_weights(3, timeout_s=0)


async def test_without_a_limit_weights_are_not_waited_for(checkpoints: Checkpoints) -> None:
    with pytest.raises(
        OrchestratorError, match=r"version 3 are not in .*: .* set orchestrator.ckpt.wait_for_weights_timeout"
    ):
        await checkpoints.await_weights(3, timeout_s=None)
    with replacing_directory(checkpoints.run.weight(3)):
        pass
    assert await checkpoints.await_weights(3, timeout_s=None) == checkpoints.run.weight(3)


def test_weights_that_the_trainer_sends_itself_are_always_waited_for() -> None:
    ckpt = CheckpointConfig(resume_step=3)
    assert weights_timeout_s(OrchestratorConfig(ckpt=ckpt)) is None
    sent = NCCLWeightBroadcastConfig(timeout=70)
    assert weights_timeout_s(OrchestratorConfig(ckpt=ckpt, weight_broadcast=sent)) == 70
    own = CheckpointConfig(resume_step=3, wait_for_weights_timeout=5)
    assert weights_timeout_s(OrchestratorConfig(ckpt=own, weight_broadcast=sent)) == 5


async def test_an_adapter_comes_from_the_broadcast_only_since_exports_are_merged(checkpoints: Checkpoints) -> None:
    of_adapter = Checkpoints(checkpoints.run, checkpoints.paths, only_published=True)
    with replacing_directory(checkpoints.run.weight(3)):
        pass
    with pytest.raises(OrchestratorError, match=r"waited for the weights of version 3 in [^ ]*broadcasts/step_3 since"):
        await of_adapter.await_weights(3, timeout_s=0)


def test_what_an_earlier_life_left_for_coming_steps_is_removed(checkpoints: Checkpoints) -> None:
    paths = checkpoints.paths
    for step in range(4):
        paths.batch(step).parent.mkdir(parents=True)
        paths.broadcast(step).mkdir(parents=True)
    remove_stale(paths, start_step=2)
    assert sorted(path.name for path in paths.rollouts.iterdir()) == ["step_0", "step_1"]
    assert sorted(path.name for path in paths.broadcasts.iterdir()) == ["step_0", "step_1", "step_2"]


def test_a_resume_discards_checkpoints_that_the_trainer_never_reached(checkpoints: Checkpoints) -> None:
    """Step 3 would otherwise belong to a trainer's checkpoint that comes from other batches."""
    save(checkpoints, 0, 1, 2, 3, 4)
    save_trainer(checkpoints, 1, 2, 4)
    remove_stale(checkpoints.paths, start_step=2)
    assert stable_steps(checkpoints.paths.checkpoints) == [0, 1, 2, 4]
    assert stable_steps(checkpoints.run.checkpoints) == [1, 2, 4]


def test_versions_that_were_sent_without_files_are_nobodys(checkpoints: Checkpoints) -> None:
    paths = checkpoints.paths
    for version in (1, 2, 3):
        with replacing_directory(paths.broadcast(version)) as scratch:
            if version == 2:
                (scratch / "model.safetensors").touch()
    paths.broadcast_ready(3).touch()
    paths.broadcasts_closed.touch()
    remove_empty_broadcasts(paths)
    assert stable_steps(paths.broadcasts) == [2]
