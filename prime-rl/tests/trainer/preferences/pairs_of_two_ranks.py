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

DIVISIONS = {1: {"processes": {}}, 2: {"processes": {}, "rows": {"cp": 2}, "layers": {"tp": 2}}}
"""What the processes divide, by their number, and the sizes of the mesh."""


def main() -> None:
    config = parse_argv_or_exit(DPOConfig)
    process = setup_world("cpu", timeout_s=3600)
    for name, sizes in DIVISIONS[process.world_size].items():
        found = all_steps(config, config.model.model_copy(update=sizes), process)
        if process.is_main:
            (config.output_dir / f"{process.world_size} {name}.json").write_text(json.dumps(found))
    destroy_world()


def all_steps(config: DPOConfig, adapted: ModelConfig, process: Process) -> list[dict[str, float]]:
    """Train three steps on the same eight rows, however many processes there are: an adapter, all weights, an
    adapter on the answers of the pairs, each with a label, and a reward model with all weights."""
    plain, mesh = adapted.model_copy(update={"lora": None}), setup_mesh(adapted, process)
    of_answers = DPOConfig.model_validate({**config.model_dump(), "loss": {"type": "kto"}})
    shared = RewardModelConfig.model_fields.keys() & DPOConfig.model_fields.keys() - {"loss"}
    keys = config.model_dump(include=set(shared))
    scoring = RewardModelConfig.model_validate({**keys, "loss": {"center_rewards_coefficient": 0.1}})
    runs = ((config, adapted), (config, plain), (of_answers, adapted), (scoring, plain))
    return [step for config, model_config in runs for step in three_steps(config, model_config, mesh)]


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
