"""Low-rank adapters (LoRA): beside a frozen weight W, a small trained product, `W x + alpha / rank * B A x`.

An adapted module keeps its class, its weights and their names; it has a `LowRank` named `lora` (stacked experts: one
for each projection) besides. So FSDP, checkpointed activations and exports see the model that they know.
"""

from __future__ import annotations

import math
from functools import partial
from types import MethodType
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from prime_rl.configs.trainer import LoRAConfig
from prime_rl.trainer.lora.targets import EXPERT_PARTS, chosen_modules
from prime_rl.utils.logger import get_logger

_SEED = 0


class LowRank(nn.Module):
    """`scale * B A x`, zero until it is trained.

    A is [*stack, rank, in], uniform in ±1/sqrt(in) (Kaiming's with a = sqrt 5), and B [*stack, out, rank], zeros; in
    the dtype and on the device of the weight that it belongs to. `stack` is empty, or the number of experts.
    """

    def __init__(self, config: LoRAConfig, weight: Tensor, out_features: int, generator: torch.Generator) -> None:
        super().__init__()
        *stack, _, in_features = weight.shape
        self.A = nn.Parameter(weight.new_empty(*stack, config.rank, in_features))
        self.B = nn.Parameter(weight.new_zeros(*stack, out_features, config.rank))
        if not weight.is_meta:
            bound = 1 / math.sqrt(in_features)
            # Drawn on the CPU, one after the other: the same numbers whatever the device and the number of processes.
            drawn = torch.empty(self.A.shape).uniform_(-bound, bound, generator=generator)
            self.A.data.copy_(drawn)
        self.rank, self.alpha = config.rank, config.alpha
        self.dropout = nn.Dropout(config.dropout)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        """[.., in] to [.., out]."""
        return self.product(x, self.A, self.B)

    def product(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """As `forward`, with one expert's A and B."""
        return nn.functional.linear(nn.functional.linear(self.dropout(x), a), b) * self.scale

    @torch.no_grad()
    def delta(self) -> Tensor:
        """What it adds to the weight, [*stack, out, in] in float32; a collective call."""
        return (whole(self.B).float() @ whole(self.A).float()) * self.scale


class _StackedExperts(Protocol):
    """A module with the weights of all experts in one tensor for each projection, once it is adapted."""

    down_proj: Tensor
    lora: nn.ModuleDict

    def _apply_gate(self, gate_up: Tensor) -> Tensor: ...


def adapted(model: PreTrainedModel, config: LoRAConfig | None, compute_dtype: torch.dtype) -> PreTrainedModel:
    """Freeze `model`, except for `modules_to_save`, and add the adapters that `config` asks for; None leaves all as is.

    The frozen weights are only ever read in the compute dtype; where that is smaller than theirs, they are kept in it.

    Raises:
        ModelError: a name matches nothing, or something that cannot be adapted.
    """
    if config is None:
        return model
    chosen = chosen_modules(model, config)
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
    for parameter in model.parameters():
        if not parameter.requires_grad and compute_dtype.itemsize < parameter.dtype.itemsize:
            parameter.data = parameter.data.to(compute_dtype)
    return model


def is_adapted(model: nn.Module) -> bool:
    """Whether `model` has adapters."""
    return any(isinstance(module, LowRank) for module in model.modules())


def log_adapters(model: nn.Module) -> None:
    """Say how much of the model is trained."""
    count = sum(isinstance(module, LowRank) for module in model.modules())
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained, total = sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)
    get_logger().info(f"LoRA: {count} adapters, {trained:,} of {total:,} parameters trained ({trained / total:.2%})")


def own_names(model: nn.Module) -> set[str]:
    """Names of the adapters' parameters, which the hub's files of the model do not have."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, LowRank)
        for name, _ in module.named_parameters()
    }


def merged(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The whole `weight` that the model calls `name`, with what its adapter adds, if it has one; a collective call."""
    path, _, leaf = name.rpartition(".")
    lora = getattr(model.get_submodule(path), "lora", None)
    if isinstance(lora, LowRank) and leaf == "weight":
        return weight.float() + lora.delta()
    if isinstance(lora, nn.ModuleDict) and leaf in EXPERT_PARTS:
        return weight.float() + torch.cat([part.delta() for part in _parts_of(lora, leaf)], dim=-2)
    return weight


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or what its shards make up together; a collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _add_low_rank(module: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    assert isinstance(module.lora, LowRank)
    added: Tensor = module.lora(inputs[0])
    return output + added


def _adapt_experts(experts: nn.Module, config: LoRAConfig, generator: torch.Generator) -> None:
    loras = nn.ModuleDict()
    experts.lora = loras
    for name, parts in EXPERT_PARTS.items():
        weight = getattr(experts, name)
        for part in parts:
            loras[part] = LowRank(config, weight, weight.shape[-2] // len(parts), generator)
    experts.forward = MethodType(_experts_forward, experts)


def _parts_of(loras: nn.ModuleDict, name: str) -> list[LowRank]:
    """The adapters of the stacked weight `name`."""
    return [cast("LowRank", loras[part]) for part in EXPERT_PARTS[name]]


def _experts_forward(
    experts: _StackedExperts, hidden_NH: Tensor, top_k_index_NK: Tensor, top_k_weights_NK: Tensor
) -> Tensor:
    """What Transformers' stacked experts compute, with each expert's adapters beside its weights.

    Adding the products to the weights instead would need no loop, but in bfloat16 it would round small updates away.
    """
    order = top_k_index_NK.flatten().argsort(stable=True)
    token = order // top_k_index_NK.shape[1]
    counts = top_k_index_NK.flatten().bincount(minlength=len(experts.down_proj)).tolist()
    gate_up, down = (_expert_projections(experts, name) for name in ("gate_up_proj", "down_proj"))
    pieces = [
        down_of(experts._apply_gate(gate_up_of(x)))
        for x, gate_up_of, down_of in zip(hidden_NH[token].split(counts), gate_up, down, strict=True)
    ]
    weighted = torch.cat(pieces) * top_k_weights_NK.flatten()[order, None]
    return torch.zeros_like(hidden_NH).index_add_(0, token, weighted.to(hidden_NH.dtype))


def _expert_projections(experts: _StackedExperts, name: str) -> list[partial[Tensor]]:
    """For each expert a function of its tokens: the projection with the weight `name` and what adapts it."""
    loras = _parts_of(experts.lora, name)
    # Unbinding once, and not indexing for each expert, keeps the backward pass linear in the number of experts.
    weights = getattr(experts, name).unbind()
    factors = [zip(lora.A.unbind(), lora.B.unbind(), strict=True) for lora in loras]
    return [partial(_project, weight, loras, own) for weight, *own in zip(weights, *factors, strict=True)]


def _project(weight: Tensor, loras: list[LowRank], factors: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    added = [lora.product(x, a, b) for lora, (a, b) in zip(loras, factors, strict=True)]
    return nn.functional.linear(x, weight) + torch.cat(added, dim=-1)
