"""Low-rank adapters (LoRA, Hu et al. 2021): `W x + alpha / rank * B A x` with W frozen and A and B trained.

An adapted module keeps its class, weights and parameter names, and gets a submodule `lora`: a `LowRank`, or one per
projection for stacked experts. FSDP, activation checkpointing and exports therefore work as for the plain model.
"""

from __future__ import annotations

import math
import re
from functools import partial
from types import MethodType
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from prime_rl.configs.trainer import LoRAConfig
from prime_rl.trainer.lora.targets import EXPERT_PROJECTIONS, select_modules
from prime_rl.utils.logger import get_logger

_SEED = 0


class LowRank(nn.Module):
    """Computes `scale * B A x`, which is zero before training.

    A [*stack, rank, in] is initialized uniformly in ±1/sqrt(in) (Kaiming with a = sqrt(5)), and B [*stack, out, rank]
    with zeros, in the dtype and on the device of the adapted weight. `stack` is empty or the number of experts.
    """

    def __init__(self, config: LoRAConfig, weight: Tensor, out_features: int, generator: torch.Generator) -> None:
        super().__init__()
        *stack, _, in_features = weight.shape
        self.A = nn.Parameter(weight.new_empty(*stack, config.rank, in_features))
        self.B = nn.Parameter(weight.new_zeros(*stack, out_features, config.rank))
        if not weight.is_meta:
            bound = 1 / math.sqrt(in_features)
            # Drawn on the CPU with one generator, so that values do not depend on device or number of processes.
            drawn = torch.empty(self.A.shape).uniform_(-bound, bound, generator=generator)
            self.A.data.copy_(drawn)
        self.rank, self.alpha = config.rank, config.alpha
        self.dropout = nn.Dropout(config.dropout)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return self.product(x, self.A, self.B)

    def product(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Like `forward`, with the A and B of one expert."""
        return nn.functional.linear(nn.functional.linear(self.dropout(x), a), b) * self.scale

    @torch.no_grad()
    def delta(self) -> Tensor:
        """The equivalent weight update `scale * B A`, float32 [*stack, out, in]. Collective."""
        return (full_tensor(self.B).float() @ full_tensor(self.A).float()) * self.scale


class _StackedExperts(Protocol):
    """A module of stacked experts (one weight tensor per projection) after adapters have been added."""

    down_proj: Tensor
    lora: nn.ModuleDict

    def _apply_gate(self, gate_up: Tensor) -> Tensor: ...


def add_adapters(model: PreTrainedModel, config: LoRAConfig | None, compute_dtype: torch.dtype) -> PreTrainedModel:
    """Freeze `model` except for `modules_to_save`, and add the adapters in `config`. None changes nothing.

    Frozen weights are only read in the compute dtype, so they are stored in it if it is smaller than their own. Those
    that Transformers loads in float32 stay in it, because exports do too.

    Raises:
        ModelError: a target name matches no module, or a module that cannot be adapted.
    """
    if config is None:
        return model
    chosen = select_modules(model, config)
    generator = torch.Generator().manual_seed(_SEED)
    model.requires_grad_(False)
    for module in chosen.saved.values():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(True)
    for module in chosen.linear.values():
        module.lora = LowRank(config, module.weight, module.weight.shape[0], generator)
        module.register_forward_hook(_add_low_rank)
    for module in chosen.experts.values():
        _adapt_experts(module, config, generator)
    in_float32 = float32_names(model, compute_dtype)
    for name, parameter in model.named_parameters():
        is_larger = compute_dtype.itemsize < parameter.dtype.itemsize
        if not parameter.requires_grad and is_larger and not in_float32.search(name):
            parameter.data = parameter.data.to(compute_dtype)
    return model


def is_adapted(model: nn.Module) -> bool:
    """Whether `model` has adapters."""
    return any(isinstance(module, LowRank) for module in model.modules())


def log_adapters(model: nn.Module) -> None:
    """Log the number of adapters and of trained parameters."""
    count = sum(isinstance(module, LowRank) for module in model.modules())
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained, total = sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)
    get_logger().info(f"LoRA: {count} adapters, {trained:,} of {total:,} parameters trained ({trained / total:.2%})")


def adapter_parameter_names(model: nn.Module) -> set[str]:
    """Names of the adapters' parameters, which are not part of the model's hub format."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, LowRank)
        for name, _ in module.named_parameters()
    }


def merge_adapter(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """Return the full `weight` of parameter `name` plus its adapter's update, if there is one. Collective."""
    path, _, leaf = name.rpartition(".")
    lora = getattr(model.get_submodule(path), "lora", None)
    if isinstance(lora, LowRank) and leaf == "weight":
        return weight.float() + lora.delta()
    if isinstance(lora, nn.ModuleDict) and leaf in EXPERT_PROJECTIONS:
        return weight.float() + torch.cat([part.delta() for part in _parts_of(lora, leaf)], dim=-2)
    return weight


def float32_names(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str]:
    """Matches the names of weights that Transformers loads in float32 if the model is in `dtype`, such as routers."""
    return re.compile("|".join(model._get_dtype_plan(dtype)).replace("*", ".*") or "(?!)")


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor's shards into the full tensor; other tensors are returned as they are. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _add_low_rank(module: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    assert isinstance(module.lora, LowRank)
    added: Tensor = module.lora(inputs[0])
    return output + added


def _adapt_experts(experts: nn.Module, config: LoRAConfig, generator: torch.Generator) -> None:
    loras = nn.ModuleDict()
    experts.lora = loras
    for name, parts in EXPERT_PROJECTIONS.items():
        weight = getattr(experts, name)
        for part in parts:
            loras[part] = LowRank(config, weight, weight.shape[-2] // len(parts), generator)
    experts.forward = MethodType(_experts_forward, experts)


def _parts_of(loras: nn.ModuleDict, name: str) -> list[LowRank]:
    """The adapters of the stacked weight `name`."""
    return [cast("LowRank", loras[part]) for part in EXPERT_PROJECTIONS[name]]


def _experts_forward(
    experts: _StackedExperts, hidden_NH: Tensor, top_k_index_NK: Tensor, top_k_weights_NK: Tensor
) -> Tensor:
    """Forward pass of Transformers' stacked experts, with each expert's adapters applied separately.

    Merging adapters into the weights would need no loop over experts, but bfloat16 rounding would lose small updates.
    """
    order = top_k_index_NK.flatten().argsort(stable=True)
    token = order // top_k_index_NK.shape[1]
    counts = top_k_index_NK.flatten().bincount(minlength=len(experts.down_proj)).tolist()
    gate_up, down = (_expert_projections(experts, name) for name in ("gate_up_proj", "down_proj"))
    outputs = [
        down_of(experts._apply_gate(gate_up_of(x)))
        for x, gate_up_of, down_of in zip(hidden_NH[token].split(counts), gate_up, down, strict=True)
    ]
    weighted = torch.cat(outputs) * top_k_weights_NK.flatten()[order, None]
    return torch.zeros_like(hidden_NH).index_add_(0, token, weighted.to(hidden_NH.dtype))


def _expert_projections(experts: _StackedExperts, name: str) -> list[partial[Tensor]]:
    """For each expert, a function that projects its tokens with weight `name` and its adapters."""
    loras = _parts_of(experts.lora, name)
    # Unbind once instead of indexing per expert, so that the backward pass is linear in the number of experts.
    weights = getattr(experts, name).unbind()
    factors = [zip(lora.A.unbind(), lora.B.unbind(), strict=True) for lora in loras]
    return [partial(_project, weight, loras, own) for weight, *own in zip(weights, *factors, strict=True)]


def _project(weight: Tensor, loras: list[LowRank], factors: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    added = [lora.product(x, a, b) for lora, (a, b) in zip(loras, factors, strict=True)]
    return nn.functional.linear(x, weight) + torch.cat(added, dim=-1)
