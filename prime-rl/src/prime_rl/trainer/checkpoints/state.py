"""The state of a training run that a checkpoint holds, and its parts as they are saved.

Frozen weights are left out: they come with the model, and a resumed run must have the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from prime_rl.trainer.checkpoints.files import load_object, rank_file
from prime_rl.trainer.model.lora import LowRank
from prime_rl.trainer.optim.scheduler import continue_schedule
from prime_rl.trainer.process.errors import ResumeRefused

_DIGEST_RANGE = 2**40


def without_frozen(model_state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """`model_state` without the frozen weights, which come with the model."""
    weights = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, weight in weights if not weight.requires_grad}
    return {name: value for name, value in model_state.items() if name not in frozen}


def identity_of_frozen(model: nn.Module) -> dict[str, Any]:
    """A fingerprint of the frozen weights, and the scale of the adapters. Collective.

    It depends neither on the number of processes nor on whether the weights are in float32 or bfloat16.
    """
    lora = next((module for module in model.modules() if isinstance(module, LowRank)), None)
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    total = torch.tensor(sum(map(_sum_of_bits, frozen)) % _DIGEST_RANGE)
    dist.all_reduce(total)
    return {"weights": int(total) % _DIGEST_RANGE, "scale": None if lora is None else lora.scale}


def check_frozen(saved: dict[str, Any], model: PreTrainedModel, where: object) -> None:
    """Compare the frozen weights of `model` with those of the checkpoint at `where`. Collective.

    Raises:
        ResumeRefused: the trained weights of the checkpoint belong to other frozen weights.
    """
    own = identity_of_frozen(model)
    if saved["scale"] != own["scale"]:
        raise ResumeRefused(f"{where} was saved {_scaled(saved)}, and this config trains {_scaled(own)}")
    if saved["weights"] != own["weights"]:
        raise ResumeRefused(
            f"{where} holds only the trained weights, and the frozen weights have changed: "
            f"model.name = {model.config.name_or_path} is not the model that it was trained on"
        )


def _scaled(identity: dict[str, Any]) -> str:
    scale = identity["scale"]
    return "without model.lora" if scale is None else f"with model.lora.alpha / rank = {scale:g}"


def _sum_of_bits(weight: Tensor) -> int:
    """Sum of the bits of this process's shard; 0 for all but the first of several copies."""
    if isinstance(weight, DTensor):
        position = weight.device_mesh.get_coordinate() or ()
        if any(at > 0 and axis.is_replicate() for at, axis in zip(position, weight.placements, strict=True)):
            return 0
        weight = weight.to_local()
    return int(weight.detach().to(torch.bfloat16).view(torch.int16).sum(dtype=torch.int64))


Role = Literal["policy", "critic", "teacher"]
"""Use of a model in a run. Both trainers have a policy only."""


@dataclass(slots=True)
class Progress:
    """Counters that a resumed trainer needs besides weights, optimizer, schedule and data position."""

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
    """State of the whole run, as a checkpoint holds it. Each process adds its data position and random state."""

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
    """Read the file that process `rank` saved.

    Older checkpoints hold one model, at the top level, and each process was a data rank. They are returned in today's
    layout, with `is_policy_alone` set.
    """
    own = load_object(rank_file(directory, rank))
    if "schedulers" in own:
        return own | {"is_policy_alone": False}
    by_role = {"schedulers": {"policy": own["scheduler"]}, "frozen": {"policy": own["frozen"]}}
    return own | by_role | {"data_rank": rank, "data_size": own["world_size"], "is_policy_alone": True}
