"""Weights that no step changes: checkpoints leave them out, and a resumed run has to have the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from prime_rl.trainer.lora.adapters import LowRank
from prime_rl.trainer.process.errors import CheckpointError

_DIGEST_RANGE = 2**40


def without_frozen(model_state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """`model_state` without what comes with the model."""
    weights = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, weight in weights if not weight.requires_grad}
    return {name: value for name, value in model_state.items() if name not in frozen}


def identity_of_frozen(model: nn.Module) -> dict[str, Any]:
    """What tells frozen weights, and how much adapters count beside them, from others; a collective call.

    It does not depend on the number of processes, nor on whether the weights are kept in float32 or bfloat16.
    """
    lora = next((module for module in model.modules() if isinstance(module, LowRank)), None)
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    total = torch.tensor(sum(map(_sum_of_bits, frozen)) % _DIGEST_RANGE)
    dist.all_reduce(total)
    return {"weights": int(total) % _DIGEST_RANGE, "scale": None if lora is None else lora.scale}


def check_frozen(saved: dict[str, Any], model: nn.Module, where: object) -> None:
    """Compare with what the checkpoint `where` says; a collective call.

    Raises:
        CheckpointError: its adapters, or whatever it holds, were trained beside other weights.
    """
    own = identity_of_frozen(model)
    if saved["scale"] != own["scale"]:
        raise CheckpointError(f"{where} was saved {_scaled(saved)}, and this config trains {_scaled(own)}")
    if saved["weights"] != own["weights"]:
        raise CheckpointError(
            f"{where} holds trained weights alone, and the others have changed: "
            f"model.name = {model.config.name_or_path} is not the model that they were trained beside"
        )


def _scaled(identity: dict[str, Any]) -> str:
    scale = identity["scale"]
    return "without model.lora" if scale is None else f"with model.lora.alpha / rank = {scale:g}"


def _sum_of_bits(weight: Tensor) -> int:
    """Of this process's shard; of HSDP's copies only the first counts."""
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        if mesh.ndim > 1 and mesh.get_coordinate()[0] > 0:
            return 0
        weight = weight.to_local()
    return int(weight.detach().to(torch.bfloat16).view(torch.int16).sum(dtype=torch.int64))
