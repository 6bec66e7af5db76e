"""The state of a training run that a checkpoint holds, its saved parts, and what a resumed run has restored.

Frozen weights are left out: they come with the model, and a resumed run must have the same ones. All others come from
the checkpoint alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from prime_rl.run.attempts import checked_files
from prime_rl.run.checkpoints import Changes
from prime_rl.run.early_stop import History
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.checkpoints.files import load_object, random_state, rank_file
from prime_rl.trainer.model.balance import Balance
from prime_rl.trainer.model.lora import LowRank, frozen_names
from prime_rl.trainer.optim.scheduler import continue_schedule
from prime_rl.trainer.process.errors import ResumeRefused
from prime_rl.trainer.process.world import Process
from prime_rl.utils.logger import get_logger

_DIGEST_RANGE = 2**40


def without_frozen(model_state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """`model_state` without the frozen weights, which come with the model."""
    frozen = frozen_names(model)
    return {name: value for name, value in model_state.items() if name not in frozen}


def identity_of_frozen(model: nn.Module) -> dict[str, Any]:
    """A fingerprint of the frozen weights, and the scale of the adapters, or a list if they differ. Collective.

    It depends neither on the number of processes nor on whether the weights are in float32 or bfloat16.
    """
    scales = [module.scale for module in model.modules() if isinstance(module, LowRank)]
    names = frozen_names(model)
    frozen = [weight for name, weight in model.named_parameters() if name in names]
    total = torch.tensor(sum(map(_sum_of_bits, frozen)) % _DIGEST_RANGE)
    dist.all_reduce(total)
    return {
        "weights": int(total) % _DIGEST_RANGE,
        "scale": scales if len(set(scales)) > 1 else next(iter(scales), None),
    }


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
    if isinstance(scale, list):
        return f"with patterns of scales from {min(scale):g} to {max(scale):g}"
    return "without model.lora" if scale is None else f"with model.lora.alpha / rank = {scale:g}"


def _sum_of_bits(weight: Tensor) -> int:
    """Sum of the bits of this process's shard; 0 for all but the first of several copies."""
    if isinstance(weight, DTensor):
        position = weight.device_mesh.get_coordinate() or ()
        if any(at > 0 and axis.is_replicate() for at, axis in zip(position, weight.placements, strict=True)):
            return 0
        # Of weights that tensor parallelism leaves whole, there is a copy on each of several meshes.
        if 0 not in weight.device_mesh.mesh:
            return 0
        weight = weight.to_local()
    return int(weight.detach().to(torch.bfloat16).view(torch.int16).sum(dtype=torch.int64))


Role = Literal["policy", "critic", "teacher", "reference"]
"""Use of a model in a run. RL may train a critic beside its policy."""


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
    balance: Balance | None = None
    """Counts the load of a mixture's experts. None counts nothing."""
    check: Callable[[], None] | None = None
    """Checks the model when it has been restored, if it was built without values."""

    def balanced(self) -> dict[str, float]:
        """Balance the experts after an optimizer step, and return the metrics of their load. Collective."""
        return {} if self.balance is None else self.balance.step()

    def tensors(self) -> dict[str, Any]:
        """The part of the state that all processes save together. Collective."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        is_new = not self.optimizer.state
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        if is_new:
            # PyTorch has made the states by an update with gradients of zero. It is none: AdamW would count it and make
            # the first real update too small, and SGD would keep its weight decay as momentum.
            for states in self.optimizer.state.values():
                for value in states.values():
                    if isinstance(value, Tensor):
                        value.zero_()
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
        if self.check is not None:
            self.check()


@dataclass(slots=True)
class TrainState:
    """State of the whole run, as a checkpoint holds it. Each process adds its data position and random state."""

    trained: Mapping[Role, TrainedModel]
    """Models that the run updates. Checkpoints hold their trained weights, optimizers and schedules."""
    progress: Progress = field(default_factory=Progress)
    frozen: Mapping[Role, PreTrainedModel] = field(default_factory=dict)
    """Models that the run only reads, such as a teacher. Checkpoints hold a fingerprint of their weights."""
    copies: dict[Role, PreTrainedModel] = field(default_factory=dict)
    """Models that now and then take the weights of a trained one. Checkpoints hold all of their weights."""
    adapted: dict[str, float] = field(default_factory=dict)
    """Numbers that the run adapts, such as the weight of the KL penalty."""
    history: History = field(default_factory=History)
    """What the rules of `[early_stop]` look at. In RL, the orchestrator has it."""
    tp: int = 1
    """Number of neighbouring processes that divide layers, and draw the same random numbers."""

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
            "copies": sorted(self.copies),
            "adapted": dict(self.adapted),
            "history": asdict(self.history),
            "tp": self.tp,
        }

    def tensors(self, copies: Iterable[Role]) -> dict[str, Any]:
        """The part of the state that all processes save together, with some of the copies. Collective."""
        trained: dict[str, Any] = {role: trained.tensors() for role, trained in self.trained.items()}
        return trained | {f"copy_{role}": self.copies[role].state_dict() for role in copies}


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


# A resumed run: its config against that of its checkpoint, and what it has restored.


def check_changes(changes: Changes, process: Process) -> None:
    """Log which changed keys are applied and which have no effect.

    Raises:
        ResumeRefused: a key changed that makes the run no continuation, with one line for each such key.
    """
    if faults := list(changes.faults()):
        raise ResumeRefused("\n".join(faults))
    if process.is_main:
        for line in changes.lines():
            get_logger().info(line)


def restored_state(state: TrainState, paths: RunPaths, step: int, process: Process) -> dict[str, Any]:
    """Facts for the receipt. Norms and random states are those of this process, which may hold a part of each tensor.

    Raises:
        RunDirError: the marker of the checkpoint is damaged.
    """
    progress = state.progress
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "samples": progress.samples,
        **{role: _restored_model(trained) for role, trained in state.trained.items()},
        "random_xxh3_64": {name: _digest(value) for name, value in random_state(process.device).items()},
        "processes": process.world_size,
        "files": checked_files(paths.checkpoint(step)),
    }


def summary_of(facts: dict[str, Any]) -> str:
    """The facts in one line."""
    optimizer, checked = facts["policy"]["optimizer"], len(facts["files"]["xxh3_128"])
    files = (
        f"{checked} files match their hashes" if checked else "its marker has no hashes, so the files were not verified"
    )
    return (
        f"step {facts['step']}, {facts['tokens']} tokens, {facts['samples']} samples; {optimizer['type']} at "
        f"update {optimizer['updates']}, schedule at step {facts['policy']['schedule']['step']}, random state; {files}"
    )


def _restored_model(trained: TrainedModel) -> dict[str, Any]:
    weights = [parameter for parameter in trained.model.parameters() if parameter.requires_grad]
    return {
        "weights": {"tensors": len(weights), "norm": _norm(weights)},
        "optimizer": _restored_optimizer(trained.optimizer),
        "schedule": {"step": trained.scheduler.last_epoch, "learning_rates": trained.scheduler.get_last_lr()},
    }


def _restored_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    states = list(optimizer.state.values())
    names = sorted({name for state in states for name, value in state.items() if _is_moment(name, value)})
    moments = {name: [state[name] for state in states if name in state] for name in names}
    updates = [int(state["step"]) for state in states if "step" in state]
    return {
        "type": type(optimizer).__name__,
        "updates": max(updates, default=0),
        "tensors": sum(map(len, moments.values())),
        "norms": {name: _norm(tensors) for name, tensors in moments.items()},
    }


def _is_moment(name: str, value: object) -> bool:
    return name != "step" and isinstance(value, Tensor)


@torch.no_grad()
def _norm(tensors: list[Any]) -> float:
    """Euclidean norm of all elements that this process holds."""
    own = (_local(tensor) for tensor in tensors)
    floats = (each if each.is_floating_point() else each.float() for each in own)  # 8-bit states are whole numbers
    parts = [torch.linalg.vector_norm(each, dtype=torch.float64).item() for each in floats]
    return sum(part**2 for part in parts) ** 0.5


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def _digest(value: object) -> str:
    content = value.cpu().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
    return xxhash.xxh3_64_hexdigest(content)
