from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from prime_rl.configs.ranges import AUTO, LATEST
from prime_rl.configs.trainer import (
    AdamWConfig,
    CheckpointConfig,
    ConstantSchedulerConfig,
    LinearSchedulerConfig,
    ModelConfig,
    MuonConfig,
    SGDConfig,
    TokenizerConfig,
    WeightCheckpointConfig,
)
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.trainer.checkpoints.files import random_state
from prime_rl.trainer.checkpoints.manager import CheckpointManager
from prime_rl.trainer.checkpoints.state import Progress, TrainedModel, TrainState, identity_of_frozen
from prime_rl.trainer.checkpoints.weights import gather_weights
from prime_rl.trainer.model.build import export_dtype, setup_model
from prime_rl.trainer.model.scoring import score_tokens
from prime_rl.trainer.model.tokenizer import setup_tokenizer
from prime_rl.trainer.optim.optimizer import clip_gradients, offload_states, setup_optimizer
from prime_rl.trainer.optim.scheduler import setup_scheduler
from prime_rl.trainer.process.errors import CheckpointError
from prime_rl.trainer.process.mesh import DataAxis, Mesh
from prime_rl.utils.contents import write_marker


def new_state(
    model_dir: Path, mesh: Mesh, optim=None, schedule=None, max_steps: int = 10, states_on_host: bool = False
) -> TrainState:
    model = setup_model(ModelConfig(name=str(model_dir), attn="sdpa"), mesh)
    optimizer = setup_optimizer(optim or AdamWConfig(lr=1e-2), model)
    if states_on_host:
        offload_states(optimizer, mesh.process.device)
    scheduler = setup_scheduler(schedule or ConstantSchedulerConfig(), optimizer, max_steps)
    return TrainState({"policy": TrainedModel(model, optimizer, scheduler)})


def update(trained: TrainedModel, tokens: Tensor) -> float:
    """Train one step on `tokens`. Returns the gradient norm."""
    places = torch.arange(tokens.shape[1])[None]
    score_tokens(trained.model, tokens, places, lambda h, logits_of: logits_of(h).logsumexp(-1).sum()).backward()
    norm = clip_gradients(trained.model, 1.0)
    trained.optimizer.step()
    trained.scheduler.step()
    trained.optimizer.zero_grad()
    return norm


def train(state: TrainState, steps: int) -> list[float]:
    """Train steps on random tokens, different ones for each step. Returns the gradient norms."""
    norms = []
    for _ in range(steps):
        tokens = torch.randint(0, 128, (1, 50))
        norms.append(update(state.policy, tokens))
        state.progress.advance(tokens=50, samples=1)
    return norms


def manager(root: Path, mesh: Mesh, **fields) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(**fields), RunPaths(root), mesh.process, mesh.data_axis)


@pytest.mark.parametrize("rule", [{"keep_last": 1}, {"keep_interval": 100}], ids=str)
def test_the_best_step_that_another_process_chooses_is_kept_and_the_newest_until_it_is_evaluated(
    tiny_model_dir: Path, tmp_path: Path, mesh: Mesh, rule: dict[str, int]
) -> None:
    paths, choices = RunPaths(tmp_path), [None, 1, 1, 3]
    config = CheckpointConfig(keep_best=True, weights=None, **rule)
    # Each save sees the choice among the steps before it.
    left = iter(choices)
    checkpoints = CheckpointManager(config, paths, mesh.process, mesh.data_axis, best_elsewhere=lambda: next(left))
    state, kept = new_state(tiny_model_dir, mesh), []
    for _ in choices:
        train(state, 1)
        checkpoints.save(state, {})
        kept.append(stable_steps(paths.checkpoints))
    assert kept == [[1], [1, 2], [1, 3], [3, 4]]


@pytest.mark.parametrize("states_on_host", [False, True])
@pytest.mark.parametrize(
    "optim",
    [
        pytest.param(AdamWConfig(lr=1e-2), id="adamw"),
        pytest.param(SGDConfig(lr=1e-2), id="sgd"),
        pytest.param(MuonConfig(lr=1e-2), id="muon"),
    ],
)
def test_a_loaded_run_continues_bit_identically(
    tiny_model_dir: Path, tmp_path: Path, mesh: Mesh, optim, states_on_host: bool
) -> None:
    schedule = LinearSchedulerConfig(warmup_steps=5, decay_steps=2)
    straight = new_state(tiny_model_dir, mesh, optim, schedule, states_on_host=states_on_host)
    train(straight, 3)
    manager(tmp_path, mesh).save(straight, {"position": 17})
    expected = train(straight, 3)

    resumed = new_state(tiny_model_dir, mesh, optim, schedule, states_on_host=states_on_host)
    torch.manual_seed(999)
    assert manager(tmp_path, mesh).load(resumed, 3) == [{"position": 17}]
    assert resumed.progress == Progress(step=3, tokens=150, samples=3)
    assert train(resumed, 3) == expected
    assert resumed.policy.scheduler.get_last_lr() == straight.policy.scheduler.get_last_lr()
    weights, others = (gather_weights(state.policy.model, torch.float32) for state in (straight, resumed))
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_process_more_draws_other_random_numbers_than_those_before(
    tiny_model_dir: Path, tmp_path: Path, mesh: Mesh
) -> None:
    state = new_state(tiny_model_dir, mesh)
    train(state, 1)
    manager(tmp_path, mesh).save(state, {})
    second = replace(mesh, process=replace(mesh.process, rank=1))
    draws = []
    for own_mesh, tp in ((mesh, 1), (second, 1), (second, 2)):
        torch.manual_seed(999)
        state.tp = tp
        manager(tmp_path, own_mesh).load(state, 1)
        draws.append(torch.rand(1).item())
    first, other, sharing = draws
    assert first != other
    assert sharing == first, "it divides the layers of the first process, and drops what that one drops"


def with_critic(model_dir: Path, mesh: Mesh) -> TrainState:
    """A policy and a critic, with different optimizers and schedules."""
    policy = new_state(model_dir, mesh).policy
    critic = new_state(model_dir, mesh, SGDConfig(lr=1e-3), LinearSchedulerConfig(warmup_steps=5, decay_steps=2)).policy
    return TrainState({"policy": policy, "critic": critic})


def train_both(state: TrainState, steps: int) -> list[float]:
    norms = []
    for _ in range(steps):
        norms += [update(trained, torch.randint(0, 128, (1, 50))) for trained in state.trained.values()]
        state.progress.advance(tokens=50, samples=1)
    return norms


def test_models_of_two_roles_continue_bit_identically(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    straight = with_critic(tiny_model_dir, mesh)
    train_both(straight, 3)
    manager(tmp_path, mesh).save(straight, {})
    expected = train_both(straight, 3)

    resumed = with_critic(tiny_model_dir, mesh)
    torch.manual_seed(999)
    manager(tmp_path, mesh).load(resumed, 3)
    assert train_both(resumed, 3) == expected
    for role, trained in straight.trained.items():
        found = resumed.trained[role]
        weights, others = (gather_weights(each.model, torch.float32) for each in (trained, found))
        assert all(torch.equal(weights[name], others[name]) for name in weights)
        assert found.scheduler.get_last_lr() == trained.scheduler.get_last_lr()
    policy, critic = (gather_weights(trained.model, torch.float32) for trained in resumed.trained.values())
    assert not any(torch.equal(policy[name], critic[name]) for name in policy)


def test_a_checkpoint_without_a_role_of_this_run_is_refused(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    manager(tmp_path, mesh).save(new_state(tiny_model_dir, mesh), {})
    with pytest.raises(CheckpointError, match="holds policy, and this config trains critic and policy"):
        manager(tmp_path, mesh).load(with_critic(tiny_model_dir, mesh), 0)


def test_a_run_with_another_frozen_model_is_refused(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    def with_teacher() -> TrainState:
        teacher = setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa"), mesh).requires_grad_(False)
        return TrainState(new_state(tiny_model_dir, mesh).trained, frozen={"teacher": teacher})

    manager(tmp_path, mesh).save(with_teacher(), {})
    resumed = with_teacher()
    manager(tmp_path, mesh).load(resumed, 0)
    with torch.no_grad():
        next(resumed.frozen["teacher"].parameters()).mul_(2)
    with pytest.raises(CheckpointError, match="teacher"):
        manager(tmp_path, mesh).load(resumed, 0)


def test_a_checkpoint_of_the_layout_before_roles_is_loaded(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    straight = new_state(tiny_model_dir, mesh, schedule=LinearSchedulerConfig(warmup_steps=5, decay_steps=2))
    train(straight, 2)
    save_as_before_roles(straight, RunPaths(tmp_path), {"position": 17})
    expected = train(straight, 2)

    resumed = new_state(tiny_model_dir, mesh, schedule=LinearSchedulerConfig(warmup_steps=5, decay_steps=2))
    assert manager(tmp_path, mesh).load(resumed, 2) == [{"position": 17}]
    assert resumed.progress == Progress(step=2, tokens=100, samples=2)
    assert train(resumed, 2) == expected


def save_as_before_roles(state: TrainState, paths: RunPaths, data: dict[str, int]) -> None:
    """Write what the checkpoint manager wrote when a run had one model and each process was a data rank."""
    directory = paths.trainer_checkpoint(state.progress.step)
    dcp.save(state.policy.tensors(), checkpoint_id=directory)
    own = {
        "progress": asdict(state.progress),
        "scheduler": state.policy.scheduler.state_dict(),
        "data": data,
        "random": random_state(torch.device("cpu")),
        "world_size": 1,
        "frozen": identity_of_frozen(state.policy.model),
    }
    torch.save(own, directory / "rank_0.pt")


@pytest.mark.parametrize(
    ("saved_by", "axis", "positions"),
    [
        pytest.param([0, 0], DataAxis(0, 1), [10], id="two processes shared the rows"),
        pytest.param([0, 1], DataAxis(0, 1), [10, 11], id="two data ranks become one"),
        pytest.param([0, 0, 1, 1], DataAxis(1, 2), [11], id="each rank of two finds its own"),
        pytest.param([0, 0, 1, 1], DataAxis(0, 3), [10, 11], id="two data ranks become three"),
    ],
)
def test_positions_in_the_data_are_those_of_data_ranks(
    saved_by: list[int], axis: DataAxis, positions: list[int], tiny_model_dir: Path, tmp_path: Path, mesh: Mesh
) -> None:
    """`saved_by` are the data ranks of the processes that saved; data rank r was at entry 10 + r."""
    state = new_state(tiny_model_dir, mesh)
    manager(tmp_path, mesh).save(state, {})
    directory = RunPaths(tmp_path).trainer_checkpoint(0)
    own = torch.load(directory / "rank_0.pt", weights_only=True)
    for rank, data_rank in enumerate(saved_by):
        place = {"data_rank": data_rank, "data_size": max(saved_by) + 1, "data": {"position": 10 + data_rank}}
        torch.save({**own, **place, "world_size": len(saved_by)}, directory / f"rank_{rank}.pt")
    write_marker(directory.parent, {})
    found = manager(tmp_path, replace(mesh, data_axis=axis)).load(state, 0)
    assert found == [{"position": position} for position in positions]


def test_parts_of_a_checkpoint_can_be_skipped(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    saved = new_state(tiny_model_dir, mesh, schedule=LinearSchedulerConfig(warmup_steps=4, decay_steps=0))
    train(saved, 2)
    manager(tmp_path, mesh).save(saved, {"position": 17})
    fresh = new_state(tiny_model_dir, mesh)
    options = {"skip_progress": True, "skip_scheduler": True, "skip_dataloader": True}
    assert manager(tmp_path, mesh, **options).load(fresh, 2) == []
    assert fresh.progress == Progress()
    assert fresh.policy.optimizer.param_groups[0]["lr"] == 1e-2


def test_the_oldest_checkpoints_are_deleted_except_multiples(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    state = new_state(tiny_model_dir, mesh)
    checkpoints = manager(tmp_path, mesh, keep_last=2, keep_interval=4)
    for step in range(1, 8):
        state.progress.step = step
        checkpoints.save(state, {})
    assert stable_steps(RunPaths(tmp_path).checkpoints) == [4, 6, 7]


def test_without_a_rule_two_checkpoints_and_all_exports_stay(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    state = new_state(tiny_model_dir, mesh)
    tokenizer = setup_tokenizer(TokenizerConfig(), ModelConfig(name=str(tiny_model_dir)))
    checkpoints = manager(tmp_path, mesh)
    for step in (1, 2, 3, 4):
        state.progress.step = step
        checkpoints.save(state, {})
        checkpoints.export(state, tokenizer, torch.float32)
    assert stable_steps(RunPaths(tmp_path).checkpoints) == [3, 4]
    assert stable_steps(RunPaths(tmp_path).weights) == [1, 2, 3, 4]


def test_an_interval_of_one_keeps_all(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    state = new_state(tiny_model_dir, mesh)
    checkpoints = manager(tmp_path, mesh, keep_interval=1)
    for step in (1, 2, 3):
        state.progress.step = step
        checkpoints.save(state, {})
    assert stable_steps(RunPaths(tmp_path).checkpoints) == [1, 2, 3]


@pytest.mark.parametrize(
    ("stored", "asked", "exported"),
    [
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float32, "auto", torch.float32),
        (torch.float16, "auto", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
    ],
)
def test_weights_are_exported_in_the_dtype_of_the_model_unless_another_is_asked_for(
    tiny_model_dir: Path, tmp_path: Path, mesh: Mesh, stored: torch.dtype, asked, exported: torch.dtype
) -> None:
    model_dir = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(tiny_model_dir).to(stored).save_pretrained(model_dir)
    config = ModelConfig(name=str(model_dir))
    assert export_dtype(config, WeightCheckpointConfig(dtype=asked), mesh.process.device) == exported


def test_retention_ignores_an_abandoned_continuation(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    state = new_state(tiny_model_dir, mesh)
    for step in (10, 20, 30):
        state.progress.step = step
        manager(tmp_path, mesh).save(state, {})
    state.progress.step = 15
    manager(tmp_path, mesh, resume_step=10, keep_last=1).save(state, {})
    assert stable_steps(RunPaths(tmp_path).checkpoints) == [15, 20, 30]


def test_the_latest_complete_step_is_resumed(tmp_path: Path, mesh: Mesh) -> None:
    paths = RunPaths(tmp_path)
    for step in (5, 12):
        paths.trainer_checkpoint(step).mkdir(parents=True)
        (paths.checkpoint(step) / "STABLE").touch()
    paths.trainer_checkpoint(20).mkdir(parents=True)
    assert manager(tmp_path, mesh, resume_step=-1).resume_step() == 12
    assert manager(tmp_path, mesh, resume_step=5).resume_step() == 5
    assert manager(tmp_path, mesh).resume_step() is None
    with pytest.raises(CheckpointError, match=r"step_20 to resume from \(complete steps: 5, 12\); .* --resume 12"):
        manager(tmp_path, mesh, resume_step=20).resume_step()


def test_without_checkpoints_latest_is_refused_and_auto_starts_from_scratch(tmp_path: Path, mesh: Mesh) -> None:
    assert manager(tmp_path, mesh, resume_step=AUTO).resume_step() is None
    with pytest.raises(CheckpointError, match="nothing to resume"):
        manager(tmp_path, mesh, resume_step=LATEST).resume_step()


def test_checkpoints_are_due_at_multiples_of_the_interval(tmp_path: Path, mesh: Mesh) -> None:
    checkpoints = manager(tmp_path, mesh, interval=3)
    assert [step for step in range(8) if checkpoints.is_due(step)] == [3, 6]
    assert not any(manager(tmp_path, mesh).is_due(step) for step in range(8))


def test_a_checkpoint_of_another_model_is_refused(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    state = new_state(tiny_model_dir, mesh)
    train(state, 1)
    manager(tmp_path, mesh).save(state, {})
    wider = AutoConfig.from_pretrained(tiny_model_dir)
    wider.intermediate_size *= 2
    AutoModelForCausalLM.from_config(wider).save_pretrained(tmp_path / "wider")
    with pytest.raises(CheckpointError, match=r"does not fit this model and optimizer: .*mlp"):
        manager(tmp_path, mesh).load(new_state(tmp_path / "wider", mesh), 1)


def test_weights_are_exported_unless_switched_off(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    state = new_state(tiny_model_dir, mesh)
    tokenizer = setup_tokenizer(TokenizerConfig(), ModelConfig(name=str(tiny_model_dir)))
    manager(tmp_path, mesh, weights=None).export(state, tokenizer, torch.float32)
    assert stable_steps(RunPaths(tmp_path).weights) == []
    manager(tmp_path, mesh).export(state, tokenizer, torch.float32)
    assert stable_steps(RunPaths(tmp_path).weights) == [0]
