"""`ckpt.async_save`: writes the same checkpoints while training continues."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from prime_rl.configs.trainer import (
    AdamWConfig,
    CheckpointConfig,
    ConstantSchedulerConfig,
    ModelConfig,
    TokenizerConfig,
)
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.trainer.checkpoints.files import BackgroundJobs
from prime_rl.trainer.checkpoints.manager import CheckpointManager
from prime_rl.trainer.checkpoints.state import Progress, TrainedModel, TrainState
from prime_rl.trainer.checkpoints.weights import gather_weights
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.scoring import score_tokens
from prime_rl.trainer.model.tokenizer import setup_tokenizer
from prime_rl.trainer.optim.optimizer import setup_optimizer
from prime_rl.trainer.optim.scheduler import setup_scheduler
from prime_rl.trainer.process.errors import CheckpointError
from prime_rl.trainer.process.mesh import Mesh


def new_state(model_dir: Path, mesh: Mesh) -> TrainState:
    model = setup_model(ModelConfig(name=str(model_dir), attn="sdpa"), mesh)
    optimizer = setup_optimizer(AdamWConfig(lr=1e-2), model)
    scheduler = setup_scheduler(ConstantSchedulerConfig(), optimizer, 10)
    return TrainState({"policy": TrainedModel(model, optimizer, scheduler)})


def take_step(state: TrainState) -> None:
    tokens, places = torch.arange(50)[None], torch.arange(50)[None]
    score_tokens(state.policy.model, tokens, places, lambda h, logits_of: logits_of(h).logsumexp(-1).sum()).backward()
    state.policy.optimizer.step()
    state.policy.scheduler.step()
    state.policy.optimizer.zero_grad()
    state.progress.advance(tokens=50, samples=1)


def everything(state: TrainState) -> list[torch.Tensor]:
    """Copies of weights and optimizer moments."""
    moments = [value for values in state.policy.optimizer.state.values() for value in values.values()]
    whole = [getattr(value, "full_tensor", value.clone)() for value in moments]
    return [*gather_weights(state.policy.model, torch.float32).values(), *(value.clone() for value in whole)]


def manager(root: Path, mesh: Mesh, **fields) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(async_save=True, **fields), RunPaths(root), mesh.process, mesh.data_axis)


def test_a_loss_that_is_no_number_is_never_the_best(tmp_path: Path, mesh: Mesh) -> None:
    checkpoints = manager(tmp_path, mesh, keep_best=True)
    assert [checkpoints.is_best(loss) for loss in (math.nan, math.inf, 3.0)] == [False, False, True]


def test_a_checkpoint_holds_the_state_at_the_time_of_the_save(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    state, checkpoints = new_state(tiny_model_dir, mesh), manager(tmp_path, mesh)
    take_step(state)
    checkpoints.save(state, {})
    take_step(state)
    expected = everything(state)
    position = {"position": [3]}
    checkpoints.save(state, position)
    # Training continues at once and modifies the tensors that are being saved.
    position["position"].append(4)
    take_step(state)
    checkpoints.wait()

    resumed = new_state(tiny_model_dir, mesh)
    assert manager(tmp_path, mesh).load(resumed, 2) == [{"position": [3]}]
    assert resumed.progress == Progress(step=2, tokens=100, samples=2)
    assert all(map(torch.equal, everything(resumed), expected))


def test_saves_run_in_order_and_old_ones_are_deleted(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    state, checkpoints = new_state(tiny_model_dir, mesh), manager(tmp_path, mesh, keep_last=1, keep_best=True)
    tokenizer = setup_tokenizer(TokenizerConfig(), ModelConfig(name=str(tiny_model_dir)))
    paths = RunPaths(tmp_path)
    for val_losses, kept, best in (
        ((3.0, 1.0, 2.0, 2.5), [2, 4], '{"step": 2, "val_loss": 1.0}\n'),
        ((0.5,), [5], '{"step": 5, "val_loss": 0.5}\n'),
    ):
        for val_loss in val_losses:
            take_step(state)
            checkpoints.save(state, {})
            checkpoints.export(state, tokenizer, torch.float32)
            if checkpoints.is_best(val_loss):
                checkpoints.mark_best(state.progress.step, val_loss)
        checkpoints.wait()
        assert stable_steps(paths.checkpoints) == stable_steps(paths.weights) == kept
        assert paths.best_checkpoint.read_text() == best


def test_a_failed_write_is_reported_by_the_next_save(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    state, checkpoints = new_state(tiny_model_dir, mesh), manager(tmp_path, mesh, keep_best=True)
    paths = RunPaths(tmp_path)
    take_step(state)
    checkpoints.save(state, {})
    take_step(state)
    (paths.checkpoints).mkdir(exist_ok=True)
    paths.checkpoint(2).with_name("step_2.partial").write_text("in the way")
    checkpoints.save(state, {})
    checkpoints.mark_best(2, 1.0)
    with pytest.raises(
        CheckpointError, match=r"could not write a checkpoint; earlier checkpoints are complete: .*step_2"
    ):
        checkpoints.save(state, {})
    assert stable_steps(paths.checkpoints) == [1]
    assert not paths.best_checkpoint.exists()


def test_jobs_run_in_order_until_one_fails() -> None:
    done: list[int] = []
    jobs = BackgroundJobs()
    for number in (1, 2):
        jobs.submit(lambda number=number: done.append(number))
    jobs.submit(lambda: done.append(1 // 0))
    jobs.submit(lambda: done.append(4))
    with pytest.raises(ZeroDivisionError):
        jobs.wait()
    jobs.wait()
    assert done == [1, 2]
