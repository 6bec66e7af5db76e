"""Sets up the optimizer, and clips gradients."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from prime_rl.configs.trainer import AdamWConfig, MuonConfig, OptimizerConfig, SGDConfig
from prime_rl.trainer.optim.muon import Muon, split_for_muon
from prime_rl.trainer.optim.offload import offload_states
from prime_rl.trainer.optim.shards import ShardAdamW, global_norm, scale
from prime_rl.trainer.process.host_memory import keep_freed_memory
from prime_rl.utils.logger import get_logger


def setup_optimizer(config: OptimizerConfig, model: nn.Module, states_on_host: bool = False) -> Optimizer:
    """The optimizer of all trainable parameters. Weight decay applies to each of them.

    With `states_on_host` its states are in host memory, and on the GPU only while their parameters are updated.
    """
    optimizer = _optimizer(config, model)
    device = next(model.parameters()).device
    if states_on_host and device.type == "cuda":
        offload_states(optimizer, device)
    elif states_on_host:
        get_logger().info("model.optim_cpu_offload has nothing to do on a CPU: states are in host memory")
    if device.type == "cpu":
        if isinstance(optimizer, AdamW):
            _make_states(optimizer)
        # From here on, tensors live for a step at most.
        keep_freed_memory()
    return optimizer


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that their norm is at most `max_norm`; returns the norm before. Collective."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        return 0.0
    norm = global_norm(gradients)
    # As PyTorch's `clip_grad_norm_`: no division by zero, and no branch, for which a GPU would have to be waited for.
    scale(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return float(norm)


def _optimizer(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    match config:
        case AdamWConfig():
            # The fused kernel updates all parameters in one pass. On a CPU it is five times as fast as the loop.
            return ShardAdamW(
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
        case MuonConfig():
            return Muon(config, *split_for_muon(model))


def _make_states(optimizer: AdamW) -> None:
    """Create AdamW's states now, instead of in the first update, when activations are already on the heap."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # These zeros are written here. Pages that the system zeroes (NumPy's zeros) would be mapped twice in the
            # first update, once to be read and once to be written, each time interrupting the other threads.
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
