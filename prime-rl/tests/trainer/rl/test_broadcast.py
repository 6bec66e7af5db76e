"""Filesystem broadcast: versions appear atomically, old ones are removed, and a failed write stops the run."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from prime_rl.configs.trainer import FileSystemWeightBroadcastConfig, ModelConfig
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.rl.broadcast import FileSystemBroadcast
from prime_rl.utils.files import scratch_of


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
