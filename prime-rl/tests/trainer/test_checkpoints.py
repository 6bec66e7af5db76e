from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prime_rl.configs.trainer import (
    AdamWConfig,
    CheckpointConfig,
    ConstantSchedulerConfig,
    LinearSchedulerConfig,
    ModelConfig,
    MuonConfig,
    SGDConfig,
    TokenizerConfig,
)
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.trainer.checkpoints.manager import CheckpointManager, Progress, TrainState
from prime_rl.trainer.checkpoints.weights import gather_weights
from prime_rl.trainer.model.build import setup_model, setup_tokenizer
from prime_rl.trainer.model.scoring import score_tokens
from prime_rl.trainer.optim.offload import offload_states
from prime_rl.trainer.optim.optimizer import clip_gradients, setup_optimizer
from prime_rl.trainer.optim.scheduler import setup_scheduler
from prime_rl.trainer.process.errors import CheckpointError
from prime_rl.trainer.process.world import World


def new_state(
    model_dir: Path, world: World, optim=None, schedule=None, max_steps: int = 10, states_on_host: bool = False
) -> TrainState:
    model = setup_model(ModelConfig(name=str(model_dir), attn="sdpa"), world)
    optimizer = setup_optimizer(optim or AdamWConfig(lr=1e-2), model)
    if states_on_host:
        offload_states(optimizer, world.device)
    return TrainState(
        model, optimizer, setup_scheduler(schedule or ConstantSchedulerConfig(), optimizer, max_steps), Progress()
    )


def train(state: TrainState, steps: int) -> list[float]:
    """Gradient norms of the steps, each on its own random tokens."""
    norms = []
    for _ in range(steps):
        tokens = torch.randint(0, 128, (1, 50))
        places = torch.arange(50)[None]
        score_tokens(state.model, tokens, places, lambda h, logits_of: logits_of(h).logsumexp(-1).sum()).backward()
        norms.append(clip_gradients(state.model, 1.0))
        state.optimizer.step()
        state.scheduler.step()
        state.optimizer.zero_grad()
        state.progress.advance(tokens=50, samples=1)
    return norms


def manager(root: Path, world: World, **fields) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(**fields), RunPaths(root), world)


@pytest.mark.parametrize("states_on_host", [False, True])
@pytest.mark.parametrize(
    "optim",
    [
        pytest.param(AdamWConfig(lr=1e-2), id="adamw"),
        pytest.param(SGDConfig(lr=1e-2), id="sgd"),
        pytest.param(MuonConfig(lr=1e-2), id="muon"),
    ],
)
def test_a_loaded_run_goes_on_bit_for_bit(
    tiny_model_dir: Path, tmp_path: Path, world: World, optim, states_on_host: bool
) -> None:
    schedule = LinearSchedulerConfig(warmup_steps=5, decay_steps=2)
    straight = new_state(tiny_model_dir, world, optim, schedule, states_on_host=states_on_host)
    train(straight, 3)
    manager(tmp_path, world).save(straight, {"position": 17})
    expected = train(straight, 3)

    resumed = new_state(tiny_model_dir, world, optim, schedule, states_on_host=states_on_host)
    torch.manual_seed(999)
    assert manager(tmp_path, world).load(resumed, 3) == [{"position": 17}]
    assert resumed.progress == Progress(step=3, tokens=150, samples=3)
    assert train(resumed, 3) == expected
    assert resumed.scheduler.get_last_lr() == straight.scheduler.get_last_lr()
    weights, others = (gather_weights(state.model, torch.float32) for state in (straight, resumed))
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_parts_of_a_checkpoint_can_be_left_aside(tiny_model_dir: Path, tmp_path: Path, world: World) -> None:
    saved = new_state(tiny_model_dir, world, schedule=LinearSchedulerConfig(warmup_steps=4, decay_steps=0))
    train(saved, 2)
    manager(tmp_path, world).save(saved, {"position": 17})
    fresh = new_state(tiny_model_dir, world)
    options = {"skip_progress": True, "skip_scheduler": True, "skip_dataloader": True}
    assert manager(tmp_path, world, **options).load(fresh, 2) == []
    assert fresh.progress == Progress()
    assert fresh.optimizer.param_groups[0]["lr"] == 1e-2


def test_the_oldest_checkpoints_are_deleted_but_for_multiples(
    tiny_model_dir: Path, tmp_path: Path, world: World
) -> None:
    state = new_state(tiny_model_dir, world)
    checkpoints = manager(tmp_path, world, keep_last=2, keep_interval=4)
    for step in range(1, 8):
        state.progress.step = step
        checkpoints.save(state, {})
    assert stable_steps(RunPaths(tmp_path).checkpoints) == [4, 6, 7]


def test_retention_leaves_an_abandoned_continuation_alone(tiny_model_dir: Path, tmp_path: Path, world: World) -> None:
    state = new_state(tiny_model_dir, world)
    for step in (10, 20, 30):
        state.progress.step = step
        manager(tmp_path, world).save(state, {})
    state.progress.step = 15
    manager(tmp_path, world, resume_step=10, keep_last=1).save(state, {})
    assert stable_steps(RunPaths(tmp_path).checkpoints) == [15, 20, 30]


def test_the_latest_complete_step_is_resumed(tmp_path: Path, world: World) -> None:
    paths = RunPaths(tmp_path)
    for step in (5, 12):
        paths.trainer_checkpoint(step).mkdir(parents=True)
        (paths.checkpoint(step) / "STABLE").touch()
    paths.trainer_checkpoint(20).mkdir(parents=True)
    assert manager(tmp_path, world, resume_step=-1).resume_step() == 12
    assert manager(tmp_path, world, resume_step=5).resume_step() == 5
    assert manager(tmp_path, world).resume_step() is None
    with pytest.raises(CheckpointError, match=r"ckpt\.resume_step = 20: .*complete steps: 5, 12"):
        manager(tmp_path, world, resume_step=20).resume_step()


def test_latest_of_nothing_starts_afresh(tmp_path: Path, world: World) -> None:
    assert manager(tmp_path, world, resume_step=-1).resume_step() is None


def test_checkpoints_are_due_at_multiples_of_the_interval(tmp_path: Path, world: World) -> None:
    checkpoints = manager(tmp_path, world, interval=3)
    assert [step for step in range(8) if checkpoints.is_due(step)] == [3, 6]
    assert not any(manager(tmp_path, world).is_due(step) for step in range(8))


def test_a_checkpoint_of_another_model_is_refused(tiny_model_dir: Path, tmp_path: Path, world: World) -> None:
    state = new_state(tiny_model_dir, world)
    train(state, 1)
    manager(tmp_path, world).save(state, {})
    wider = AutoConfig.from_pretrained(tiny_model_dir)
    wider.intermediate_size *= 2
    AutoModelForCausalLM.from_config(wider).save_pretrained(tmp_path / "wider")
    with pytest.raises(CheckpointError, match=r"does not fit this model and optimizer: .*mlp"):
        manager(tmp_path, world).load(new_state(tmp_path / "wider", world), 1)


def test_weights_are_exported_unless_switched_off(tiny_model_dir: Path, tmp_path: Path, world: World) -> None:
    state = new_state(tiny_model_dir, world)
    tokenizer = setup_tokenizer(TokenizerConfig(), ModelConfig(name=str(tiny_model_dir)))
    manager(tmp_path, world, weights=None).export(state, tokenizer, torch.float32)
    assert stable_steps(RunPaths(tmp_path).weights) == []
    manager(tmp_path, world).export(state, tokenizer, torch.float32)
    assert stable_steps(RunPaths(tmp_path).weights) == [0]
