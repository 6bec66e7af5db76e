"""Divides the experts of a mixture among processes: expert parallelism, `model.ep`.

Each of `ep` neighbours holds some of the experts, whole. It sends a token to the processes that hold the experts of the
token, and they return what those computed (all-to-all). The experts' own forward pass runs in between, on tokens that
chose one expert each, so that its kernels and adapters stay as they are.

Weights are divided along the stack of experts, so that each part is one block of the tensor, as files and checkpoints
take it. FSDP shards the parts further, over the processes that hold the same experts.

Processes that divide layers (`model.tp`) hold the same tokens: each of them sends its share.

Shapes: N tokens of this process with K experts each, P pairs of a token and an expert, H the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from prime_rl.trainer.model.blocks import decoder_blocks
from prime_rl.trainer.model.lora import is_routed
from prime_rl.trainer.model.tensor_parallel import divided, with_weights
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.transport.loading import local
from prime_rl.utils.logger import count_of, get_logger


def divide_experts(model: PreTrainedModel, mesh: Mesh, *, needs_experts: bool) -> None:
    """Divide the experts of a `model` without values among the processes of `mesh.expert_axis`, if there is one.

    Raises:
        ModelError: there are no experts and `needs_experts`, or they cannot be divided.
    """
    if mesh.expert_axis is None:
        return
    sharing, name = mesh.expert_axis.sharing, type(model).__name__
    stacks = {path: module for path, module in decoder_blocks(model).named_modules() if is_routed(module)}
    if needs_experts and not stacks:
        raise ModelError(f"model.ep: {name} has no experts that can be divided: remove model.ep")
    for path, experts in stacks.items():
        count = next(weight.shape[0] for weight in experts.parameters(recurse=False))
        if count % sharing.size():
            key = "model.ep" if needs_experts else "model.tp"
            raise ModelError(f"{key} = {sharing.size()} does not divide the {count} experts of {path}")
        # Adapters of experts are stacked, too.
        for module in experts.modules():
            for key, weight in list(module.named_parameters(recurse=False)):
                setattr(module, key, divided(weight, 0, sharing))
        own = count // sharing.size()
        held = cast("Any", experts)
        held.num_experts, held.first_expert = own, sharing.get_local_rank() * own
        tp = None if mesh.tensor_axis is None else mesh.tensor_axis.sharing
        experts.forward = _dispatching(with_weights(experts, local), own, sharing.get_group(), tp)
    if stacks and mesh.process.is_main:
        layers = count_of("layer", len(stacks))
        get_logger().info(f"Expert parallelism: {sharing.size()} processes divide the experts of {layers}")


def shard_experts(block: nn.Module, mesh: Mesh, shard: Callable[..., Any], policy: MixedPrecisionPolicy) -> None:
    """Make an FSDP unit of a block's experts, where other processes hold the same experts than the same layers."""
    axis = mesh.expert_axis
    if axis is None or axis is mesh.tensor_axis:
        return
    copies = axis.fsdp.size(axis.fsdp.ndim - 1)

    def placement(weight: nn.Parameter) -> Shard:
        """Along the experts, or within each where there are fewer than processes."""
        own = local(weight).shape
        return Shard(1) if own[0] % copies and own[1] % copies == 0 else Shard(0)

    for experts in filter(is_routed, block.modules()):
        # Weights of a router may be more exact than hidden states, and stay so.
        kept = replace(policy, cast_forward_inputs=False)
        unit = shard(experts, mesh=axis.fsdp, mp_policy=kept, shard_placement_fn=placement)
        assert isinstance(unit, FSDPModule)
        # An expert's gradient is already summed over the processes that send it tokens. Dividing by all that hold
        # different tokens, not only by those that hold the expert, makes it the average that other weights get.
        tp = 1 if mesh.tensor_axis is None else mesh.tensor_axis.sharing.size()
        unit.set_gradient_divide_factor(mesh.fsdp.size() // tp)
        # Gloo cannot multiply while it reduces. With nothing to reduce, FSDP would divide a forced sum twice.
        unit.set_force_sum_reduction_for_comms(copies > 1)


def _dispatching(
    forward: Callable[..., Tensor], own: int, group: dist.ProcessGroup, tp: DeviceMesh | None
) -> Callable[..., Tensor]:
    """The forward pass of divided experts; `forward` is that of the `own` experts of this process. Collective."""

    def run(hidden_NH: Tensor, top_k_index_NK: Tensor, top_k_weights_NK: Tensor) -> Tensor:
        if tp is None:
            return exchange(hidden_NH, top_k_index_NK, top_k_weights_NK)
        shares = (_own_share(each, tp) for each in (hidden_NH, top_k_index_NK, top_k_weights_NK))
        return _all_shares(exchange(*shares), tp, hidden_NH)

    def exchange(hidden_NH: Tensor, top_k_index_NK: Tensor, top_k_weights_NK: Tensor) -> Tensor:
        processes, chosen_P = group.size(), top_k_index_NK.flatten()
        # Sorted by expert, and so by the process that holds it.
        order_P = chosen_P.argsort(stable=True)
        sent = chosen_P.bincount(minlength=processes * own).view(processes, own)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        # Waits for a GPU once.
        outgoing, incoming = torch.stack((sent, received)).sum(-1).tolist()
        token_P = order_P // top_k_index_NK.shape[1]
        tokens = all_to_all_single_autograd(hidden_NH[token_P], incoming, outgoing, group)
        experts = torch.arange(own, device=sent.device).repeat(processes).repeat_interleave(received.flatten())
        count = len(tokens)
        if count == 0:
            # FSDP waits for gradients of all processes, so one without tokens computes one for nothing.
            tokens, experts = torch.cat((tokens, tokens.new_zeros(1, tokens.shape[1]))), experts.new_zeros(1)
        output = forward(tokens, experts[:, None], tokens.new_ones(len(tokens), 1))[:count]
        returned_PH = all_to_all_single_autograd(output.contiguous(), outgoing, incoming, group)
        output_PH = torch.empty_like(returned_PH).index_copy(0, order_P, returned_PH)
        weighted_NKH = output_PH.unflatten(0, top_k_index_NK.shape) * top_k_weights_NK[..., None]
        return weighted_NKH.sum(1).to(hidden_NH.dtype)

    return run


def _own_share(whole: Tensor, tp: DeviceMesh) -> Tensor:
    """This process's share of what all processes of `tp` have. Collective, backward."""
    return DTensor.from_local(whole, tp, [Replicate()], run_check=False).redistribute(tp, [Shard(0)]).to_local()


def _all_shares(share: Tensor, tp: DeviceMesh, like: Tensor) -> Tensor:
    """The shares of all processes of `tp`, which together have the shape of `like`. Collective."""
    parts = DTensor.from_local(
        share.contiguous(), tp, [Shard(0)], run_check=False, shape=like.shape, stride=like.contiguous().stride()
    )
    return parts.redistribute(tp, [Replicate()]).to_local()
