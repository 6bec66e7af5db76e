"""A damaged or hostile checkpoint is refused by the name of its file, and nothing in it runs."""

from __future__ import annotations

import io
import os
import pickle
import random
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from prime_rl.configs.trainer import AdamWConfig, CheckpointConfig, ConstantSchedulerConfig, ModelConfig
from prime_rl.run.directory import RunDirError, check_run_dir
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.checkpoints.files import load_object
from prime_rl.trainer.checkpoints.manager import CheckpointManager
from prime_rl.trainer.checkpoints.sharded import read_sharded
from prime_rl.trainer.checkpoints.state import TrainedModel, TrainState
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.optim.optimizer import setup_optimizer
from prime_rl.trainer.optim.scheduler import setup_scheduler
from prime_rl.trainer.process.errors import CheckpointError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.process.world import ForbiddenPickle, PlainUnpickler, RankError

STEP = 7


class Runs:
    """Unpickled without limits, it makes a file."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.made),)


@pytest.fixture
def state(tiny_model_dir: Path, mesh: Mesh) -> TrainState:
    model = setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa"), mesh)
    optimizer = setup_optimizer(AdamWConfig(lr=1e-2), model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    trained = TrainedModel(model, optimizer, setup_scheduler(ConstantSchedulerConfig(), optimizer, 10))
    state = TrainState({"policy": trained})
    state.progress.step = STEP
    return state


@pytest.fixture
def checkpoints(tmp_path: Path, mesh: Mesh, state: TrainState) -> CheckpointManager:
    """The manager of a run that has saved two checkpoints."""
    manager = CheckpointManager(CheckpointConfig(), RunPaths(tmp_path), mesh.process, mesh.data_axis)
    state.progress.step = STEP - 2
    manager.save(state, {"position": 1})
    state.progress.step = STEP
    manager.save(state, {"position": 2})
    return manager


def files_of(checkpoints: CheckpointManager) -> list[Path]:
    directory = checkpoints.paths.trainer_checkpoint(STEP)
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    assert {path.name for path in files} == {".metadata", "__0_0.distcp", "rank_0.pt"}
    return files


def test_every_flipped_bit_is_found(checkpoints: CheckpointManager, state: TrainState) -> None:
    numbers = random.Random(0)
    for path in files_of(checkpoints):
        whole = path.read_bytes()
        for _ in range(25):
            place, bit = numbers.randrange(len(whole)), 1 << numbers.randrange(8)
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            with pytest.raises(CheckpointError) as refused:
                checkpoints.load(state, STEP)
            assert str(refused.value) == (
                f"{path} has changed since it was written (its hash differs); "
                f"continue from an earlier checkpoint with --resume {STEP - 2}"
            )
        path.write_bytes(whole)
    assert checkpoints.load(state, STEP) == [{"position": 2}]


def test_a_short_empty_or_missing_file_is_found_before_anything_is_loaded(checkpoints: CheckpointManager) -> None:
    for path in files_of(checkpoints):
        whole = path.read_bytes()
        for found in (whole[:-1], whole + b"x", b""):
            path.write_bytes(found)
            with pytest.raises(RunDirError, match=f"{path} has {len(found)} bytes instead of the {len(whole)}"):
                check_run_dir(checkpoints.paths, STEP)
        path.unlink()
        with pytest.raises(RunDirError, match=f"{path} cannot be read: No such file or directory; continue from"):
            check_run_dir(checkpoints.paths, STEP)
        path.write_bytes(whole)
    assert check_run_dir(checkpoints.paths, STEP) == STEP


def test_a_damaged_marker_is_found(checkpoints: CheckpointManager) -> None:
    marker = checkpoints.paths.checkpoint(STEP) / "STABLE"
    for text in ("{", "[]", '{"files": {"a": 1}}', '{"files": [1]}', "{}"):
        marker.write_text(text)
        with pytest.raises(RunDirError, match="STABLE cannot be read"):
            check_run_dir(checkpoints.paths, STEP)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"step": 7}', '{"step": "7", "val_loss": 1}', '{"step": 7, "val_loss": ""}', "\xff"]
)
def test_a_damaged_record_of_the_best_step_is_named(text: str, tmp_path: Path, mesh: Mesh) -> None:
    paths = RunPaths(tmp_path)
    paths.checkpoints.mkdir(parents=True)
    paths.best_checkpoint.write_text(text, encoding="latin-1")

    config = CheckpointConfig(keep_best=True, resume_step=-1)
    with pytest.raises(CheckpointError, match=f"{paths.best_checkpoint} cannot be read .*: delete it"):
        CheckpointManager(config, paths, mesh.process, mesh.data_axis)


def test_without_an_earlier_checkpoint_the_advice_is_another_run(checkpoints: CheckpointManager) -> None:
    (checkpoints.paths.trainer_checkpoint(STEP - 2) / "rank_0.pt").write_bytes(b"")

    with pytest.raises(RunDirError, match="there is no earlier checkpoint: start a new run"):
        check_run_dir(checkpoints.paths, STEP - 2)


def without_hashes(checkpoints: CheckpointManager) -> Path:
    """The trainer's part of a checkpoint whose author also wrote the marker."""
    (checkpoints.paths.checkpoint(STEP) / "STABLE").write_text("")
    return checkpoints.paths.trainer_checkpoint(STEP)


def test_an_index_that_names_code_is_refused_and_does_not_run(
    checkpoints: CheckpointManager, state: TrainState, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    (without_hashes(checkpoints) / ".metadata").write_bytes(pickle.dumps(Runs(made)))

    with pytest.raises(CheckpointError, match=r"a pickle names posix\.mkdir, which may not be loaded"):
        checkpoints.load(state, STEP)
    assert not made.exists()


def test_a_rank_file_that_names_code_is_refused_and_does_not_run(
    checkpoints: CheckpointManager, state: TrainState, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    path = without_hashes(checkpoints) / "rank_0.pt"
    torch.save(Runs(made), path)

    with pytest.raises(CheckpointError, match=r"rank_0\.pt cannot be read"):
        checkpoints.load(state, STEP)
    assert not made.exists()


def test_a_value_beside_the_tensors_that_names_code_is_refused_and_does_not_run(mesh: Mesh, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    made = tmp_path / "made"
    dcp.save({"weights": torch.ones(2), "value": Runs(made)}, checkpoint_id=tmp_path / "saved")

    with pytest.raises(CheckpointError, match="does not fit"):
        read_sharded({"weights": torch.zeros(2), "value": 0}, tmp_path / "saved")
    assert not made.exists()


@pytest.mark.parametrize(
    "content", [b"", b"no pickle", pickle.dumps([1, 2]), b"\x80\x04\x95"], ids=["empty", "text", "other", "cut"]
)
def test_files_that_are_no_checkpoint_are_one_line(
    checkpoints: CheckpointManager, state: TrainState, content: bytes
) -> None:
    directory = without_hashes(checkpoints)
    for path in (directory / ".metadata", directory / "rank_0.pt"):
        whole = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(CheckpointError) as refused:
            checkpoints.load(state, STEP)
        assert "\n" not in str(refused.value)
        path.write_bytes(whole)


def test_an_object_from_another_rank_that_names_code_is_refused_and_does_not_run(mesh: Mesh, tmp_path: Path) -> None:
    made = tmp_path / "made"

    with pytest.raises(ForbiddenPickle, match=r"posix\.mkdir"):
        dist.all_gather_object([None], Runs(made))
    assert not made.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "FileSystem"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("pathlib", "Path"),
        ("prime_rl.trainer.process.errors", "Path"),
        ("no.such.module", "name"),
    ],
)
def test_only_plain_values_and_records_of_checkpoints_are_unpickled(module: str, name: str) -> None:
    with pytest.raises(ForbiddenPickle, match="may not be loaded"):
        PlainUnpickler(io.BytesIO()).find_class(module, name)


def test_an_exception_of_another_rank_arrives_even_if_its_class_does_not(mesh: Mesh) -> None:
    received: list[object] = [None]

    dist.all_gather_object(received, subprocess.CalledProcessError(3, "program"))

    assert isinstance(received[0], RankError)
    assert received[0].args == (3, "program")


def test_exported_weights_in_torch_s_format_run_no_code(tiny_model_dir: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((tiny_model_dir / "config.json").read_bytes())
    torch.save({"weight": Runs(made)}, tmp_path / "model" / "pytorch_model.bin")
    assert zipfile.is_zipfile(tmp_path / "model" / "pytorch_model.bin")

    with pytest.raises((pickle.UnpicklingError, OSError, RuntimeError)):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not made.exists()


def test_missing_rank_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        load_object(tmp_path / "rank_0.pt")
