"""Compares a resumed run's config with that of its checkpoint, and describes what the trainer has restored."""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.optim import Optimizer

from prime_rl.run.attempts import checked_files
from prime_rl.run.paths import RunPaths
from prime_rl.run.resuming import Changes
from prime_rl.trainer.checkpoints.files import random_state
from prime_rl.trainer.checkpoints.state import TrainedModel, TrainState
from prime_rl.trainer.process.errors import ResumeRefused
from prime_rl.trainer.process.world import Process
from prime_rl.utils.logger import get_logger


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
        UnreadableMarker: the marker of the checkpoint is damaged.
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
    files = f"{checked} files match their hashes" if checked else "its marker holds no hashes: files are unchecked"
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
    parts = [torch.linalg.vector_norm(_local(tensor), dtype=torch.float64).item() for tensor in tensors]
    return sum(part**2 for part in parts) ** 0.5


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def _digest(value: object) -> str:
    content = value.cpu().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
    return xxhash.xxh3_64_hexdigest(content)
