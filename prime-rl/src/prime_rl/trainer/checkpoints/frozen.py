"""Frozen weights: checkpoints leave them out, and a resumed run must have the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from prime_rl.trainer.lora.adapters import LowRank
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
    """Of this process's shard. Of several copies only the first counts."""
    if isinstance(weight, DTensor):
        position = weight.device_mesh.get_coordinate() or ()
        if any(at > 0 and axis.is_replicate() for at, axis in zip(position, weight.placements, strict=True)):
            return 0
        weight = weight.to_local()
    return int(weight.detach().to(torch.bfloat16).view(torch.int16).sum(dtype=torch.int64))
