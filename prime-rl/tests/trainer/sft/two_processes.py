"""Started by `test_sft_run.py` as a single process, and with two processes under torchrun."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import islice

from prime_rl.configs.data import FakeDataConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import CheckpointConfig
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.checkpoints.state import TrainedModel, TrainState
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.optim.optimizer import setup_optimizer
from prime_rl.trainer.optim.scheduler import setup_scheduler
from prime_rl.trainer.process.errors import leaving_at_once
from prime_rl.trainer.process.mesh import DataAxis, Mesh, setup_mesh
from prime_rl.trainer.process.world import Process, destroy_world, setup_world
from prime_rl.trainer.sft.data.packer import setup_rows
from prime_rl.trainer.sft.loop import SFTTrainer
from prime_rl.trainer.sft.run import setup_components, train
from prime_rl.trainer.sft.step import CrossEntropy, train_step
from prime_rl.trainer.telemetry import open_telemetry
from prime_rl.utils.pydantic_config import parse_argv_or_exit


def main() -> None:
    config = parse_argv_or_exit(SFTConfig)
    process = setup_world("cpu", timeout_s=3600)
    for dp_replicate in range(1, process.world_size + 1):
        step_on_the_same_rows(config, process, dp_replicate)
    if process.world_size > 1:
        resume_half_way(config, setup_mesh(config.model, process))
    destroy_world()


def step_on_the_same_rows(config: SFTConfig, process: Process, dp_replicate: int) -> None:
    """Train one step on eight rows with different trained lengths; rows do not depend on the process count."""
    data = FakeDataConfig(input_ids="random", seq_len=48, batch_size=8)
    rows = setup_rows(data, None, 128, DataAxis(0, 1))
    every_row = list(islice(rows, 8))
    for index, row in enumerate(every_row):
        row.is_trained[: 5 * index] = False
    own_rows = every_row[process.rank * 8 // process.world_size : (process.rank + 1) * 8 // process.world_size]

    model_config = config.model.model_copy(update={"dp_replicate": dp_replicate})
    mesh = setup_mesh(model_config, process)
    model = setup_model(model_config, mesh)
    optimizer = setup_optimizer(config.optim, model)
    state = TrainState({"policy": TrainedModel(model, optimizer, setup_scheduler(config.scheduler, optimizer, 6))})
    stats = train_step(state, own_rows, max_norm=1.0, mesh=mesh, objective=CrossEntropy())
    assert stats.tokens == 8 * 48
    if process.is_main:
        name = f"{process.world_size}_processes_{dp_replicate}_replicas.json"
        (config.output_dir / name).write_text(json.dumps(asdict(stats)))


def resume_half_way(config: SFTConfig, mesh: Mesh) -> None:
    def run_in(name: str, ckpt: CheckpointConfig | None) -> None:
        changed = config.model_copy(update={"output_dir": config.output_dir / name, "ckpt": ckpt})
        paths = RunPaths(changed.output_dir)
        with open_telemetry(changed, paths, mesh.process) as telemetry:
            assert train(SFTTrainer(changed, paths, mesh, setup_components(changed, paths, mesh)), telemetry)

    run_in("straight", None)
    run_in("halves", CheckpointConfig(interval=3, async_save=True))
    run_in("halves", CheckpointConfig(resume_step=3))


with leaving_at_once():
    main()
