"""The Muon optimizer: orthogonalized momentum for matrices, AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from prime_rl.configs.trainer import MuonConfig
from prime_rl.trainer.optim.shards import ShardAdamW

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients with a steep slope at zero. Five iterations bring singular values to between about 0.7 and 1.2."""
_ITERATIONS = 5
_SMALLEST_NORM = 1e-7
_RMS_OF_ADAMW = 0.2
_VOCABULARY = ("embed_tokens", "lm_head")


class Muon(Optimizer):
    """Muon (Jordan et al., 2024) with Nesterov momentum for one parameter group, and fused AdamW for the other.

    A matrix moves by `0.2 lr sqrt(max(rows, columns))` times the orthogonalized momentum. AdamW moves it about as far
    with the same rate (Liu et al., 2025, "Muon is scalable for LLM training"), so both groups share one `lr`. Tensors
    of more than two dimensions, such as experts, are stacks of matrices. `step` is collective: each process gathers a
    sharded matrix, orthogonalizes it, and keeps its own shard.
    """

    def __init__(self, config: MuonConfig, matrices: Iterable[nn.Parameter], others: Iterable[nn.Parameter]) -> None:
        groups: list[dict[str, Any]] = []
        if matrices := list(matrices):
            groups.append({"params": matrices, "algorithm": "muon", "momentum": config.mu})
        self._adamw: ShardAdamW | None = None
        if others := list(others):
            self._adamw = ShardAdamW(others, lr=config.lr, betas=(config.betas1, config.betas2), fused=True)
            groups.append({**self._adamw.param_groups[0], "algorithm": "adamw"})
        for group in groups:
            group |= {"lr": config.lr, "weight_decay": config.weight_decay}
        super().__init__(groups, {"lr": config.lr, "weight_decay": config.weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no update here needs the loss again
        """Apply the gradients."""
        for group in self.param_groups:
            if self._adamw is not None and group["algorithm"] == "adamw":
                self._adamw.param_groups, self._adamw.state = [group], self.state
                self._adamw.step()
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_matrix(parameter, parameter.grad, group)

    def _update_matrix(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[parameter], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = _orthogonal_of_all(gradient.lerp(buffer, momentum))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * _RMS_OF_ADAMW * math.sqrt(max(parameter.shape[-2:])))


def split_for_muon(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable parameters for Muon (matrices except embeddings and head), and the other trainable ones."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.ndim >= 2 and not any(part in name for part in _VOCABULARY)
        (matrices if is_matrix else others).append(parameter)
    return matrices, others


def orthogonalised(matrices: Tensor) -> Tensor:
    """Bring singular values near 1 by a quintic Newton-Schulz iteration in bfloat16; [..., rows, columns]."""
    first, second, third = _QUINTIC
    x = matrices.to(torch.bfloat16, copy=True).reshape(-1, *matrices.shape[-2:])
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x /= x.norm(dim=(-2, -1), keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=second, alpha=third), x, beta=first)
    return (x.mT if is_tall else x).reshape(matrices.shape)


def _orthogonal_of_all(update: Tensor) -> Tensor:
    if not isinstance(update, DTensor):
        return orthogonalised(update)
    half = update.to(torch.bfloat16)
    assert isinstance(half, DTensor)
    whole = orthogonalised(half.full_tensor())
    # Every process has the whole matrix, so nothing is sent.
    return distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None).to(update.dtype)
