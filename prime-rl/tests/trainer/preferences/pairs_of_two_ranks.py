"""Started by `test_preferences.py` as a single process, and with two processes under torchrun."""

from __future__ import annotations

import json

from transformers import AutoTokenizer

from prime_rl.configs.dpo import DPOConfig, PreferenceConfig
from prime_rl.configs.rm import RewardModelConfig
from prime_rl.configs.trainer import ModelConfig
from prime_rl.trainer.checkpoints.state import TrainedModel, TrainState
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.optim.optimizer import setup_optimizer
from prime_rl.trainer.optim.scheduler import setup_scheduler
from prime_rl.trainer.preferences.objective import Preferences, Unpaired
from prime_rl.trainer.preferences.reference import reference_logprobs
from prime_rl.trainer.preferences.reward_model import Ranking
from prime_rl.trainer.process.errors import leaving_at_once
from prime_rl.trainer.process.mesh import DataAxis, Mesh, setup_mesh
from prime_rl.trainer.process.world import Process, destroy_world, setup_world
from prime_rl.trainer.sft.data.samples import DatasetStream
from prime_rl.trainer.sft.run import objective_of
from prime_rl.trainer.sft.step import train_step
from prime_rl.trainer.sft.validation import packed
from prime_rl.utils.pydantic_config import parse_argv_or_exit


def main() -> None:
    """Save what training is like on the same eight rows: of one process, and of two that divide rows, or tokens."""
    config = parse_argv_or_exit(DPOConfig)
    process = setup_world("cpu", timeout_s=3600)
    found = {}
    for cp in range(1, process.world_size + 1):
        found[f"cp {cp}"] = every_objective(config, cp, process)
    if process.is_main:
        (config.output_dir / f"{process.world_size}.json").write_text(json.dumps(found))
    destroy_world()


def every_objective(config: DPOConfig, cp: int, process: Process) -> list[dict[str, float]]:
    """Three steps with an adapter, with all weights, with an adapter on the answers of the pairs, each with a label,
    and of a reward model with all weights."""
    found = []
    for lora in (config.model.lora, None):
        model_config = config.model.model_copy(update={"lora": lora, "cp": cp})
        found += three_steps(config, model_config, setup_mesh(model_config, process))
    of_answers = DPOConfig.model_validate({**config.model_dump(), "loss": {"type": "kto"}})
    adapted = config.model.model_copy(update={"cp": cp})
    found += three_steps(of_answers, adapted, setup_mesh(adapted, process))
    shared = RewardModelConfig.model_fields.keys() & DPOConfig.model_fields.keys() - {"loss"}
    keys = config.model_dump(include=set(shared))
    scoring = RewardModelConfig.model_validate({**keys, "loss": {"center_rewards_coefficient": 0.1}})
    plain = config.model.model_copy(update={"lora": None, "cp": cp})
    return found + three_steps(scoring, plain, setup_mesh(plain, process))


def three_steps(config: PreferenceConfig, model_config: ModelConfig, mesh: Mesh) -> list[dict[str, float]]:
    tokenizer = AutoTokenizer.from_pretrained(model_config.name)
    objective = objective_of(config, config.data)
    model = setup_model(model_config, mesh, is_scored=isinstance(objective, Ranking))
    if isinstance(objective, Preferences | Unpaired):
        objective.reference = reference_logprobs(model, DatasetStream(config.data, tokenizer, mesh.data_axis), mesh)
    whole = DatasetStream(config.data, tokenizer, DataAxis(0, 1))
    rows = packed([sample for made in whole.own_share() for sample in made.samples], config.data)[:8]
    own_rows = rows[mesh.data_axis.data_rank :: mesh.data_axis.data_size]
    optimizer = setup_optimizer(config.optim, model)
    state = TrainState({"policy": TrainedModel(model, optimizer, setup_scheduler(config.scheduler, optimizer, 3))})
    steps = [train_step(state, own_rows, 1.0, mesh, objective) for _ in range(3)]
    return [{"loss": step.loss, "grad_norm": step.grad_norm, **step.metrics} for step in steps]


with leaving_at_once():
    main()
