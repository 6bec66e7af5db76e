"""Applies compilation, activation checkpointing and activation offloading to decoder blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from prime_rl.configs.trainer import ModelConfig
from prime_rl.trainer.model.activation_offload import ActivationOffload
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.versions import compile_for_all_shapes
from prime_rl.utils.logger import get_logger

Forward = Callable[..., Any]
_RECOMPILE_LIMIT = 32
"""Maximum number of compiled graphs; beyond it, blocks run uncompiled. Each kind of block (such as with a window)
needs four."""


def decoder_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Find the list of decoder blocks.

    Raises:
        ModelError: the model has no list of `num_hidden_layers` modules.
    """
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            return module
    raise ModelError(f"{type(model).__name__} has no list of decoder blocks: this architecture is not supported")


def prepare_blocks(model: PreTrainedModel, config: ModelConfig, device: torch.device, is_random: bool) -> None:
    """Wrap each block's forward according to `compile`, `ac` and `ac_offloading`. Call before FSDP adds its hooks.

    `is_random` says that blocks draw random numbers, for dropout: recomputing them then restores the random state.
    """
    offload = None
    if config.ac_offloading is not None and device.type == "cuda":
        offload = ActivationOffload(config.ac_offloading, device)
    elif config.ac_offloading is not None:
        get_logger().info("model.ac_offloading has no effect on a CPU: activations are in host memory already")
    for index, block in enumerate(decoder_blocks(model)):
        forward = block.forward
        if config.compile is not None:
            # Blocks share graphs. Single rows and masked rows need their own.
            forward = compile_for_all_shapes(
                forward, fullgraph=config.compile.fullgraph, recompile_limit=_RECOMPILE_LIMIT
            )
        if config.ac is not None and index % config.ac.freq == 0:
            forward = _checkpointed(forward, preserve_rng_state=is_random)
        if offload is not None:
            forward = offloaded(forward, offload)
        # Replace `forward` instead of wrapping the module, which would change parameter names.
        block.forward = forward


def _checkpointed(forward: Forward, preserve_rng_state: bool) -> Forward:
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)

    return recomputing


def offloaded(forward: Forward, offload: ActivationOffload) -> Forward:
    """Wrap `forward` so that `offload` stores the tensors saved by autograd."""

    def offloading(*args: Any, **kwargs: Any) -> Any:
        with offload.hooks():
            return forward(*args, **kwargs)

    return offloading
