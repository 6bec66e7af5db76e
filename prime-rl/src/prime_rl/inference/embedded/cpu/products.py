"""Linear layers on a CPU through oneDNN, with prepacked weights and fused activations or sums.

For float32 matrix products on a CPU, PyTorch uses MKL, which is limited to AVX2 on non-Intel processors: half the speed
of oneDNN's AVX-512 kernels, at the same accuracy. oneDNN also accepts prepacked weights (packing takes much of a small
batch's time) and fuses an activation or a sum into the product. The operators used here are the ones that PyTorch's
compiler emits. Shapes: N tokens, I inputs and O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from prime_rl.inference.embedded.engine.lora import Site, StepAdapters
from prime_rl.utils.limits import usable_memory_bytes

PACKED_SHARE = 0.1
"""Fraction of the usable memory for a packed copy of the weights. Larger models are not packed."""

_TYPICAL_TOKENS = 64
"""Batch size to pack the weights for. The resulting layout is the best one for all batches of 2 or more tokens."""


class MergedLinear:
    """One or more linear layers with the same input, computed as one product. Shares its weights with the layers.

    Call `refresh` after the weights have changed.
    """

    def __init__(self, layers: Sequence[nn.Linear], site: Site = (), packs: bool = False) -> None:
        self.site = site
        self.weight_OI = _merged([layer.weight for layer in layers])
        self.bias_O = _merged([layer.bias for layer in layers]) if layers[0].bias is not None else None
        self._packs = packs
        self._operand: Tensor | None = None
        """The weights in oneDNN's format; None if PyTorch's own `linear` is used."""
        if uses_onednn(self.weight_OI):
            self._operand = self.weight_OI.detach()
            self.refresh()

    def refresh(self) -> None:
        """Repack the layers' current weights."""
        if self._operand is not None and self._packs:
            self._operand = torch.ops.mkldnn._reorder_linear_weight(self.weight_OI.detach(), _TYPICAL_TOKENS)

    def __call__(self, inputs_NI: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """Outputs [N, O], including the adapters' updates."""
        outputs = self._unary(inputs_NI, "none")
        return outputs if adapters is None else adapters.add(self.site, inputs_NI, outputs)

    def silu(self, inputs_NI: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """SiLU (swish) of the outputs."""
        if adapters is not None or self._operand is None:
            return silu(self(inputs_NI, adapters))
        return self._unary(inputs_NI, "swish")

    def mul(self, inputs_NI: Tensor, others_NO: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """Elementwise product of the outputs and `others_NO`."""
        if adapters is not None or self._operand is None:
            return self(inputs_NI, adapters) * others_NO
        return self._binary(inputs_NI, others_NO, "mul")

    def add(self, inputs_NI: Tensor, others_NO: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """Sum of the outputs and `others_NO`."""
        if adapters is not None or self._operand is None:
            return self(inputs_NI, adapters) + others_NO
        return self._binary(inputs_NI, others_NO, "add")

    def _unary(self, inputs_NI: Tensor, then: str) -> Tensor:
        if self._operand is None:
            return linear(inputs_NI, self.weight_OI, self.bias_O)
        return torch.ops.mkldnn._linear_pointwise(inputs_NI, self._operand, self.bias_O, then, [], "")

    def _binary(self, inputs_NI: Tensor, others_NO: Tensor, then: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(inputs_NI, others_NO, self._operand, self.bias_O, then)


def uses_onednn(weight: Tensor) -> bool:
    """Whether products with this weight run on oneDNN."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def is_packable(model: nn.Module) -> bool:
    """Whether there is enough memory for a packed copy of the weights."""
    return sum(parameter.nbytes for parameter in model.parameters()) <= PACKED_SHARE * usable_memory_bytes()


def _merged(parameters: Sequence[Tensor]) -> Tensor:
    """Concatenate parameters along their first dimension and make each one a view of the result."""
    if len(parameters) == 1:
        return parameters[0]
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, view in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        parameter.data = view
    return joined
