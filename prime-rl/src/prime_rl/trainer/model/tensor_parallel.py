"""Divides the layers of decoder blocks among processes: tensor parallelism, `model.tp`, by Transformers' own plans.

A plan names a style for each layer. `colwise` gives a process some of the outputs, `rowwise` some of the inputs, and
between the two lies what needs no others: some of the attention heads, or of a feed-forward layer's inner features.
Every process starts and ends each of these with whole hidden states, which `rowwise` adds up. Transformers wraps the
layers so that they exchange what they must.

Embeddings and the head stay whole layers, as FSDP shards them and fused heads read them. Adapters are divided with
their layers. Some styles are done here in another way than in Transformers:

- Norms of heads: Transformers adds up `param.grad`, which FSDP has taken by then, or adds to in the next micro-batch.
- Latent attention: Transformers would pass adapters by.
- Experts: `expert_parallel.py` gives each process some of them whole, where Transformers divides each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from prime_rl.trainer.model.blocks import decoder_blocks
from prime_rl.trainer.model.lora import LowRank, is_routed
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.world import Process
from prime_rl.utils.logger import count_of, get_logger

_NORM_OF_HEADS = "replicated_with_grad_allreduce"
"""Each process computes with the whole weight, on some of the heads."""
_LATENT = "mla_kv_a_proj"
"""A whole layer, whose last outputs are the rotated keys that all heads share. The others enter a `colwise` layer."""
_EXPERTS = "moe_tp_experts"
"""A module of stacked experts."""
_OWN_STYLES = {_NORM_OF_HEADS, _LATENT, _EXPERTS}
_STYLES = {"colwise", "rowwise", "colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep"}
_DIVIDED = {"colwise": (0, "outputs"), "rowwise": (1, "inputs")}
"""The axis of weights that is divided, and what lies along it, by the beginning of the style."""


def divide_layers(model: PreTrainedModel, tp: DeviceMesh, process: Process) -> int:
    """Divide the layers of a `model` without values. Returns the number of processes that divide its heads.

    Raises:
        ModelError: Transformers has no plan for the model, or one that is not supported, or a layer cannot be divided.
    """
    plan = plan_of_blocks(model)
    divided = [(path, module, plan[key]) for path, module in model.named_modules() if (key := _generic(path)) in plan]
    for path, module, style in divided:
        _check_sizes(path, module, style, tp.size())
    model._tp_plan = {path: style for path, style in plan.items() if style not in _OWN_STYLES}
    apply_tensor_parallelism(model, tp)
    styles = {(module, style) for _, module, style in divided}
    for _, module, style in divided:
        if isinstance(adapter := getattr(module, "lora", None), LowRank):
            _divide_adapter(adapter, style, tp)
        if style == _NORM_OF_HEADS:
            module.forward = with_weights(module, partial(with_summed_gradient, tp=tp))
        elif style == _LATENT:
            rotated = model.config.get_text_config().qk_rope_head_dim
            # After the hook that adds the output of an adapter.
            module.register_forward_hook(partial(_sum_gradient_of_last, count=rotated, tp=tp))
    for parent in model.modules():
        layers = [layer for layer in parent.children() if (layer, "colwise") in styles]
        if len(layers) > 1:
            _share_input(parent, layers, tp)
    if process.is_main:
        get_logger().info(f"Tensor parallelism: {tp.size()} processes divide {count_of('layer', len(divided))}")
    return tp.size() if any("att" in path and style == "colwise" for path, style in plan.items()) else 1


def plan_of_blocks(model: PreTrainedModel) -> dict[str, str]:
    """Styles of the modules in decoder blocks, by paths with `*` for the numbers of blocks."""
    name, blocks = type(model).__name__, decoder_blocks(model)
    (inside,) = (path for path, module in model.named_modules() if module is blocks)
    held = {_generic(f"{inside}.{path}") for path, _ in blocks.named_modules()}
    # Of experts it also names the parameters.
    plan = {path: style for path, style in model.tp_plan.items() if path in held}
    if not plan:
        raise ModelError(f"model.tp: Transformers has no plan to divide the layers of {name}: remove model.tp")
    if unknown := set(plan.values()) - _STYLES - _OWN_STYLES:
        raise ModelError(f"model.tp: the plan of {name} has {', '.join(sorted(unknown))}, which is not supported")
    return plan


def _check_sizes(path: str, module: nn.Module, style: str, size: int) -> None:
    if style == _EXPERTS and not is_routed(module):
        raise ModelError(f"model.tp: {path} holds its experts apart, which is not supported")
    for weight in module.parameters(recurse=False):
        for start, (axis, what) in _DIVIDED.items():
            # The bias of a `rowwise` layer has no axis of inputs, and is whole.
            if style.startswith(start) and axis < weight.ndim and weight.shape[axis] % size:
                raise ModelError(f"model.tp = {size} does not divide the {weight.shape[axis]} {what} of {path}")


def _generic(path: str) -> str:
    """The path as plans have it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _divide_adapter(adapter: LowRank, style: str, tp: DeviceMesh) -> None:
    """Divide the B of a `colwise` layer and the A of a `rowwise` one. Of other styles, inputs and outputs are whole."""
    if style == "colwise":
        adapter.B = divided(adapter.B, 0, tp)
        adapter.B0 = None if adapter.B0 is None else divided(adapter.B0, 0, tp)
        adapter.between = partial(with_summed_gradient, tp=tp)
    elif style == "rowwise":
        adapter.A = divided(adapter.A, 1, tp)
        adapter.A0 = None if adapter.A0 is None else divided(adapter.A0, 1, tp)
        adapter.dropout = _DividedDropout(adapter.dropout.p, tp)
        adapter.between = partial(summed, tp=tp)


class _DividedDropout(nn.Dropout):
    """Dropout of the inputs that this process holds, as of one process that holds all of them."""

    def __init__(self, p: float, tp: DeviceMesh) -> None:
        super().__init__(p)
        self._tp = tp

    def forward(self, part: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return part
        whole = super().forward(part.new_ones(*part.shape[:-1], part.shape[-1] * self._tp.size()))
        return part * whole.tensor_split(self._tp.size(), -1)[self._tp.get_local_rank()]


def _share_input(parent: nn.Module, layers: Sequence[nn.Module], tp: DeviceMesh) -> None:
    """Let `layers` of `parent` that read the same states add the gradients of these, before processes sum them.

    Queries, keys and values would else each send a gradient of all states.
    """
    last: dict[str, Tensor] = {}

    def shared(forward: Callable[..., Any], given: Tensor) -> Any:
        if not (torch.is_grad_enabled() and given.requires_grad):
            return forward(given)
        if last.get("given") is not given:
            last.update(given=given, whole=DTensor.from_local(given, tp, [Replicate()], run_check=False))
        return forward(last["whole"])

    for layer in layers:
        layer.forward = partial(shared, layer.forward)
    # Recomputed blocks end by an exception once they have what the backward pass needs. Chunks of an MLP are recomputed
    # without the module itself.
    for module in (layers[-1], parent):
        module.register_forward_hook(lambda *_: last.clear(), always_call=True)


def divided(weight: nn.Parameter, axis: int, sharing: DeviceMesh) -> nn.Parameter:
    """The part of a `weight` without values that this process holds."""
    part = distribute_tensor(weight.detach(), sharing, [Shard(axis)], src_data_rank=None)
    return nn.Parameter(part, weight.requires_grad)


def with_summed_gradient(whole: Tensor, tp: DeviceMesh) -> Tensor:
    """The same tensor, whose gradient is the sum over the processes. Collective, backward."""
    shared = DTensor.from_local(whole, tp, [Replicate()], run_check=False)
    return shared.to_local(grad_placements=[Partial()])


def summed(part: Tensor, tp: DeviceMesh) -> Tensor:
    """The sum of the processes' tensors. Each has the sum's gradient. Collective."""
    parts = DTensor.from_local(part, tp, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


def _sum_gradient_of_last(module: nn.Module, inputs: Any, output: Tensor, *, count: int, tp: DeviceMesh) -> Tensor:
    others, last = output.split([output.shape[-1] - count, count], dim=-1)
    return torch.cat([others, with_summed_gradient(last, tp)], dim=-1)


def with_weights(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The forward of `module` that computes with each of its weights changed."""
    forward, held = module.forward, cast("dict[str, Tensor | None]", module._parameters)

    def run(*args: Any, **kwargs: Any) -> Any:
        gathered = dict(held)
        held.update({name: change(weight) for name, weight in gathered.items() if weight is not None})
        try:
            return forward(*args, **kwargs)
        finally:
            held.update(gathered)

    return run
