"""Products with the weights of linear layers, by the fastest kernel that is at hand.

PyTorch gives float32 products on a CPU to MKL, which stays with AVX2 on processors that are not Intel's: half the speed
of oneDNN's AVX-512 kernels, at the same accuracy. These can also take weights in the order that they like best (making
it is much of the time of a small batch), and put an activation or a sum into the product itself. The calls are those
that PyTorch's compiler makes. Shapes: N tokens, I inputs and O outputs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from prime_rl.inference.embedded.engine.lora import Site, StepAdapters

PACKED_SHARE = 0.1
"""Of the machine's memory, for weights in the order of the kernels beside the model's own. Larger models do without."""

_TYPICAL_TOKENS = 64
"""The order that is best for it is best for every batch from 2 tokens on."""


class Product:
    """One or several linear layers with a common input, computed together. Its weights are those of the layers.

    After these have changed, `refresh` must be called.
    """

    def __init__(self, layers: Sequence[nn.Linear], site: Site = (), packs: bool = False) -> None:
        self.site = site
        self.weight_OI = _joined([layer.weight for layer in layers])
        self.bias_O = _joined([layer.bias for layer in layers]) if layers[0].bias is not None else None
        self._packs = packs
        self._operand: Tensor | None = None
        """What oneDNN takes as weights; None where PyTorch's own product is used."""
        if by_onednn(self.weight_OI):
            self._operand = self.weight_OI.detach()
            self.refresh()

    def refresh(self) -> None:
        """Take over the layers' weights as they are now."""
        if self._operand is not None and self._packs:
            self._operand = torch.ops.mkldnn._reorder_linear_weight(self.weight_OI.detach(), _TYPICAL_TOKENS)

    def __call__(self, inputs_NI: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """[N, O], with what the adapters add."""
        outputs = self._alone(inputs_NI, "none")
        return outputs if adapters is None else adapters.add(self.site, inputs_NI, outputs)

    def swish(self, inputs_NI: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """`silu` of the outputs."""
        if adapters is not None or self._operand is None:
            return silu(self(inputs_NI, adapters))
        return self._alone(inputs_NI, "swish")

    def times(self, inputs_NI: Tensor, others_NO: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """The outputs, element by element times `others_NO`."""
        if adapters is not None or self._operand is None:
            return self(inputs_NI, adapters) * others_NO
        return self._with(inputs_NI, others_NO, "mul")

    def plus(self, inputs_NI: Tensor, others_NO: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """The outputs plus `others_NO`."""
        if adapters is not None or self._operand is None:
            return self(inputs_NI, adapters) + others_NO
        return self._with(inputs_NI, others_NO, "add")

    def _alone(self, inputs_NI: Tensor, then: str) -> Tensor:
        if self._operand is None:
            return linear(inputs_NI, self.weight_OI, self.bias_O)
        return torch.ops.mkldnn._linear_pointwise(inputs_NI, self._operand, self.bias_O, then, [], "")

    def _with(self, inputs_NI: Tensor, others_NO: Tensor, then: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(inputs_NI, others_NO, self._operand, self.bias_O, then)


def by_onednn(weight: Tensor) -> bool:
    """Whether oneDNN multiplies with it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def is_packable(model: nn.Module) -> bool:
    """Whether there is memory for a second copy of the weights."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sum(parameter.nbytes for parameter in model.parameters()) <= PACKED_SHARE * total


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """Parameters side by side along their first dimension, each made a view of the result."""
    if len(parameters) == 1:
        return parameters[0]
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, view in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        parameter.data = view
    return joined
