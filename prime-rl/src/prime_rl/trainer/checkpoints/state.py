"""The state of a training run that a checkpoint holds, and its parts as they are saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from prime_rl.trainer.checkpoints.files import load_object, rank_file
from prime_rl.trainer.checkpoints.frozen import check_frozen, identity_of_frozen, without_frozen
from prime_rl.trainer.optim.scheduler import continue_schedule
from prime_rl.trainer.process.errors import ResumeRefused

Role = Literal["policy", "critic", "teacher"]
"""What a model is used for. Both trainers have a policy only."""


@dataclass(slots=True)
class Progress:
    """What a resumed trainer needs to know besides weights, optimizer, schedule and data position."""

    step: int = 0
    """Optimizer steps done; also the version of the policy."""
    tokens: int = 0
    samples: int = 0

    def advance(self, tokens: int, samples: int) -> None:
        """Count one optimizer step over the tokens and samples of all data ranks."""
        self.step += 1
        self.tokens += tokens
        self.samples += samples


@dataclass(slots=True)
class TrainedModel:
    """A model and what updates it."""

    model: PreTrainedModel
    optimizer: Optimizer
    scheduler: LambdaLR

    def tensors(self) -> dict[str, Any]:
        """The part of the state that all processes save together. Collective."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        trained = without_frozen(cast(Mapping[str, Tensor], model_state), self.model)
        return {"model": trained, "optimizer": optimizer_state}

    def restore(self, tensors: dict[str, Any], schedule: dict[str, Any] | None) -> None:
        """Take over saved `tensors`, and the position in the saved `schedule`. Collective.

        What the config sets stays: the optimizer's settings, and the schedule itself with its base rate. Without a
        `schedule` the scheduler starts from its beginning.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        settings = [{key: group[key] for key in group if key != "params"} for group in self.optimizer.param_groups]
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
            options=StateDictOptions(strict=False),  # loading has already refused a checkpoint that lacks a tensor
        )
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)
        if schedule is not None:
            continue_schedule(self.scheduler, schedule["last_epoch"])


@dataclass(slots=True)
class TrainState:
    """What a checkpoint holds for the run as a whole. Each process adds its own data position and random state."""

    trained: Mapping[Role, TrainedModel]
    """Models that the run updates. Checkpoints hold their trained weights, optimizers and schedules."""
    progress: Progress = field(default_factory=Progress)
    frozen: Mapping[Role, PreTrainedModel] = field(default_factory=dict)
    """Models that the run only reads, such as a teacher. Checkpoints hold a fingerprint of their weights."""

    @property
    def policy(self) -> TrainedModel:
        return self.trained["policy"]

    @property
    def models(self) -> dict[Role, PreTrainedModel]:
        return {role: trained.model for role, trained in self.trained.items()} | dict(self.frozen)

    def own_part(self) -> dict[str, Any]:
        """The part of the state that each process saves with its own. Collective."""
        return {
            "progress": asdict(self.progress),
            "schedulers": {role: trained.scheduler.state_dict() for role, trained in self.trained.items()},
            "frozen": {role: identity_of_frozen(model) for role, model in self.models.items()},
        }


def check_models(own: dict[str, Any], state: TrainState, directory: Path) -> None:
    """Compare the models of a checkpoint with those of `state`. Collective.

    Raises:
        ResumeRefused: roles or frozen weights differ.
    """
    if own["schedulers"].keys() != state.trained.keys():
        held, wanted = (" and ".join(sorted(roles)) for roles in (own["schedulers"], state.trained))
        raise ResumeRefused(f"{directory} holds {held}, and this config trains {wanted}")
    for role, trained in state.trained.items():
        check_frozen(own["frozen"][role], trained.model, directory)
    for role, model in state.frozen.items():
        if role in own["frozen"] and own["frozen"][role] != identity_of_frozen(model):
            raise ResumeRefused(f"{directory} was saved with another {role} than {model.config.name_or_path}")


def load_rank(directory: Path, rank: int) -> dict[str, Any]:
    """What process `rank` saved.

    Older checkpoints hold one model, at the top level, and each process was a data rank. They are returned in today's
    layout, with `is_policy_alone` set.
    """
    own = load_object(rank_file(directory, rank))
    if "schedulers" in own:
        return own | {"is_policy_alone": False}
    by_role = {"schedulers": {"policy": own["scheduler"]}, "frozen": {"policy": own["frozen"]}}
    return own | by_role | {"data_rank": rank, "data_size": own["world_size"], "is_policy_alone": True}
