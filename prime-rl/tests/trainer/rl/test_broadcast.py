"""Filesystem broadcast: versions appear atomically, old ones are removed, and a failed write stops the run."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from prime_rl.configs.trainer import FileSystemWeightBroadcastConfig, ModelConfig
from prime_rl.inference.embedded.engine.weights import load_weights, read_weights
from prime_rl.inference.model_files import WeightError, check_same_model, open_checkpoint
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.trainer.checkpoints.weights import save_adapter, save_weights
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.lora import PeftAdapter
from prime_rl.trainer.rl.broadcast import FileSystemBroadcast
from prime_rl.utils.files import STABLE, scratch_of


@pytest.fixture
def model(tiny_model_dir, mesh):
    return setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa"), mesh)


def broadcast_to(out, mesh, max_async_level: int = 1) -> FileSystemBroadcast:
    return FileSystemBroadcast(FileSystemWeightBroadcastConfig(), RunPaths(out), mesh.process, max_async_level)


@pytest.mark.parametrize(("max_async_level", "left"), [(0, [5]), (1, [4, 5]), (2, [3, 4, 5])])
def test_versions_that_are_no_longer_needed_are_removed(tmp_path, model, mesh, max_async_level, left) -> None:
    broadcast = broadcast_to(tmp_path, mesh, max_async_level)
    for version in range(1, 6):
        broadcast.publish(model, version, torch.float32)
    assert stable_steps(RunPaths(tmp_path).orchestrator.broadcasts) == left


def test_a_version_is_kept_as_long_as_its_checkpoint(tmp_path, model, mesh) -> None:
    paths, broadcast = RunPaths(tmp_path), broadcast_to(tmp_path, mesh, max_async_level=0)
    for version in range(1, 6):
        broadcast.publish(model, version, torch.float32)
        if version == 2:
            paths.trainer_checkpoint(version).mkdir(parents=True)
        if version == 3:  # still being written
            scratch_of(paths.checkpoint(version)).mkdir()
    assert stable_steps(paths.orchestrator.broadcasts) == [2, 3, 5]
    shutil.rmtree(paths.checkpoint(2))
    broadcast.publish(model, 6, torch.float32)
    assert stable_steps(paths.orchestrator.broadcasts) == [3, 6]


def test_weights_are_published_in_the_dtype_and_naming_of_the_hub(tmp_path, tiny_model_dir, model, mesh) -> None:
    broadcast_to(tmp_path, mesh).publish(model, 1, torch.bfloat16)
    published = load_file(RunPaths(tmp_path).orchestrator.broadcast(1) / "model.safetensors")
    original = load_file(tiny_model_dir / "model.safetensors")
    assert published.keys() == original.keys()
    assert all(torch.equal(published[name], original[name].bfloat16()) for name in original)


def test_an_engine_hears_of_a_version_after_the_trainer_has_left_the_gpu(tmp_path, model, mesh) -> None:
    target, seen = RunPaths(tmp_path).orchestrator.broadcast(1), []
    broadcast_to(tmp_path, mesh).publish(model, 1, torch.float32, lambda: seen.append(target.exists()))
    assert seen == [False]
    assert (target / STABLE).is_file()


def test_versions_of_an_earlier_start_are_discarded(tmp_path, model, mesh) -> None:
    broadcast = broadcast_to(tmp_path, mesh, max_async_level=9)
    for version in (1, 2, 3):
        broadcast.publish(model, version, torch.float32)
    broadcast.start(1)
    assert stable_steps(RunPaths(tmp_path).orchestrator.broadcasts) == [1]


def test_a_version_that_cannot_be_written_is_an_error(tmp_path, model, mesh) -> None:
    paths = RunPaths(tmp_path).orchestrator
    paths.root.mkdir()
    paths.broadcasts.write_text("a file where the directory should be")
    with pytest.raises(OSError, match="broadcasts"):
        broadcast_to(tmp_path, mesh).publish(model, 1, torch.float32)


def test_a_resumed_trainer_does_not_touch_the_version_that_is_published(tmp_path, model, mesh) -> None:
    def inodes() -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in [published, *published.iterdir()]}

    published = RunPaths(tmp_path).orchestrator.broadcast(3)
    broadcast_to(tmp_path, mesh).publish(model, 3, torch.float32)
    before = inodes()
    resumed = broadcast_to(tmp_path, mesh)
    resumed.start(3)
    resumed.publish(model, 3, torch.float32)
    assert inodes() == before
    assert [path.name for path in published.parent.iterdir()] == ["step_3"]


@pytest.mark.parametrize("change", [lambda file: file.write_bytes(bytes(9)), lambda file: file.unlink()])
def test_a_published_version_with_other_weights_is_replaced(change, tmp_path, model, mesh) -> None:
    file = RunPaths(tmp_path).orchestrator.broadcast(3) / "model.safetensors"
    broadcast_to(tmp_path, mesh).publish(model, 3, torch.float32)
    whole = file.read_bytes()
    change(file)
    broadcast_to(tmp_path, mesh).publish(model, 3, torch.float32)
    assert file.read_bytes() == whole


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float32, torch.bfloat16]], ids=["same", "other"])
def test_a_server_that_reads_a_version_is_never_harmed_by_a_resumed_trainer(dtypes, tmp_path, model, mesh) -> None:
    """A thread loads the version again and again while trainers resume, with the same weights or in another dtype."""
    file = RunPaths(tmp_path).orchestrator.broadcast(3) / "model.safetensors"
    broadcast_to(tmp_path, mesh).publish(model, 3, dtypes[0])
    names, resumed = read_weights(file.parent).keys(), threading.Event()

    def read() -> int:
        count = 0
        while not resumed.is_set() or not count:
            assert (file.parent / STABLE).is_file()
            assert read_weights(file.parent).keys() == names
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        reads = pool.submit(read)
        for dtype in dtypes[::-1] * 25:
            broadcast_to(tmp_path, mesh).publish(model, 3, dtype)
        resumed.set()
        assert reads.result() > 0


def test_a_checkpoint_that_is_open_stays_whole_when_it_is_replaced_and_deleted(tmp_path, model, mesh) -> None:
    directory = RunPaths(tmp_path).orchestrator.broadcast(3)
    broadcast_to(tmp_path, mesh).publish(model, 3, torch.float32)
    before = load_file(directory / "model.safetensors")
    with open_checkpoint(directory) as files:
        broadcast_to(tmp_path, mesh).publish(model, 3, torch.bfloat16)
        (held,) = files.values()
        read = load_file(held)
        assert read.keys() == before.keys()
        assert all(torch.equal(read[name], before[name]) for name in before)
        shutil.rmtree(directory)
        assert load_file(held).keys() == before.keys()
    with pytest.raises(WeightError, match="does not exist"), open_checkpoint(directory):
        pass


def test_an_export_in_pytorchs_format_says_how_an_engine_gets_it(tmp_path) -> None:
    save_weights({"weight": torch.ones(2)}, tmp_path, save_format="torch")
    reason = r"has no \.safetensors file, but .*start one with this directory as its model"
    with pytest.raises(WeightError, match=reason), open_checkpoint(tmp_path):
        pass


def test_an_adapter_in_place_of_weights_is_named_as_one(tmp_path, model) -> None:
    save_adapter(PeftAdapter({"weight": torch.ones(2)}, {}), tmp_path)
    reason = r"does not fit the model: it is an adapter; .*weights that it is merged into"
    with pytest.raises(WeightError, match=reason):
        check_same_model(tmp_path, {"weight": (2,)})
    with pytest.raises(WeightError, match=reason):
        load_weights(model, read_weights(tmp_path), tmp_path)
