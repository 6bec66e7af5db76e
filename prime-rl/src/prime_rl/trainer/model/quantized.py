"""Frozen linear layers in 4 bits (NF4 of QLoRA, Dettmers et al. 2023) or in 8, by bitsandbytes.

A row of a weight is divided into blocks of 64 values. A value is stored as the nearest of 16 levels, times the largest
magnitude of its block, its scale. With double quantization the scales of a weight are stored in 8 bits themselves, 256
of them with a float32 scale of their own, around their mean. In 8 bits, a row has one scale, and a value is an integer.

Blocks do not cross rows. FSDP can therefore shard the packed values and the scales by rows as it does the weight, and
each rank quantizes the rows that it reads. Only the mean of the scales needs those of all ranks.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import tensor as distributed
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from prime_rl.configs.model import QuantizationConfig
from prime_rl.trainer.model.blocks import decoder_blocks
from prime_rl.trainer.model.lora import LowRank, is_plain_linear, source_of
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.world import Process
from prime_rl.transport.loading import Index, full_tensor, index_of, local, names_of_shared, put, put_own
from prime_rl.transport.packed import SCALES_BLOCK, Packed
from prime_rl.utils.logger import get_logger

BLOCK = 64
"""Values with one scale."""
INT8 = "int8"
"""Instead of the name of 16 levels."""
_LARGEST = 127
_AT_ONCE = 2**20
"""Values that are quantized at once. On a CPU, bitsandbytes' temporaries take 25 bytes for each."""


@functools.cache
def bitsandbytes_package() -> Any:
    """The package, which only runs with quantization or 8-bit optimizers need."""
    # It looks for a kernel for inference on the hub, which is not used here, and warns if it finds none.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import bitsandbytes

    return bitsandbytes


class QuantizedLinear(nn.Linear):
    """`W x + b` with a frozen W in 4 or 8 bits. Made of a linear layer without values, whose adapter and hooks stay."""

    packed: nn.Parameter
    """Two values per byte, uint8 [out, in / 2]; in 8 bits, int8 [out, in]."""
    scales: nn.Parameter
    """Bytes of the scales, uint8 [out, in / 64]; with single quantization those of float32 numbers, four for each. In 8
    bits a row has one such number. FSDP would round floating-point ones to the compute dtype."""
    scales_of_scales: Tensor
    mean_of_scales: Tensor
    scale_levels: Tensor
    """The 256 numbers that a byte of the scales stands for."""
    levels: str
    """bitsandbytes' name of the 16 levels, or `INT8`."""
    is_double: bool
    rounded_to: torch.dtype | None
    """Of weights that come quantized: the dtype that they were made from, to which bitsandbytes rounds them in the
    backward pass alone."""

    @classmethod
    def convert(
        cls, linear: nn.Linear, levels: str, is_double: bool, rounded_to: torch.dtype | None = None
    ) -> QuantizedLinear:
        """Turn `linear` into a quantized layer."""
        rows, device, is_int8 = linear.out_features, linear.weight.device, levels == INT8
        blocks = 1 if is_int8 else linear.in_features // BLOCK
        del linear.weight
        linear.__class__ = cls
        made = cast("QuantizedLinear", linear)
        made.levels, made.is_double, made.rounded_to = levels, is_double, rounded_to

        def stored(width: int, dtype: torch.dtype = torch.uint8) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, width, dtype=dtype, device=device), requires_grad=False)

        made.packed = stored(made.in_features, torch.int8) if is_int8 else stored(made.in_features // 2)
        made.scales = stored(blocks if is_double else 4 * blocks)
        if is_double:
            # Not without values, as the parameters are: FSDP moves buffers to its device, and leaves them there.
            of_scales = torch.zeros(-(-rows * blocks // SCALES_BLOCK))
            made.register_buffer("scales_of_scales", of_scales, persistent=False)
            made.register_buffer("mean_of_scales", torch.zeros(()), persistent=False)
            made.register_buffer("scale_levels", torch.zeros(256), persistent=False)
        return made

    def forward(self, x: Tensor) -> Tensor:
        # FSDP has gathered the parameters.
        if self.levels == INT8:
            product: Tensor = _Product8bit.apply(x, self.packed, self.scales)
            return product if self.bias is None else product + self.bias
        state = self._state(self.scales, self.rounded_to or x.dtype)
        output: Tensor = bitsandbytes_package().matmul_4bit(x, self.packed, state, bias=self.bias)
        return output

    @torch.no_grad()
    def full_weight(self) -> Tensor:
        """The whole weight that the layer computes with, float32 [out, in]. Collective."""
        packed, scales = full_tensor(self.packed), full_tensor(self.scales)
        if self.levels == INT8:
            return _numbers(packed, scales, torch.float32)
        state = self._state(scales, torch.float32)
        weight: Tensor = bitsandbytes_package().functional.dequantize_4bit(packed.view(-1, 1), state)
        return weight

    def _state(self, scales: Tensor, dtype: torch.dtype) -> Any:
        """bitsandbytes' description of the packed weight. `dtype`: that of the values that it becomes."""
        state = bitsandbytes_package().functional.QuantState
        shape = torch.Size((self.out_features, self.in_features))
        if not self.is_double:
            of_blocks = scales.view(torch.float32).flatten()
            return state(of_blocks, shape, None, BLOCK, self.levels, dtype)
        # With `fsdp_cpu_offload`, the whole scales of an export are on the host.
        of_scales, mean, levels = (
            buffer.to(scales.device) for buffer in (self.scales_of_scales, self.mean_of_scales, self.scale_levels)
        )
        nested = state(of_scales, code=levels, blocksize=SCALES_BLOCK, dtype=torch.float32)
        return state(scales.flatten(), shape, None, BLOCK, self.levels, dtype, mean, nested)


def _numbers(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that `packed` stands for, which is in 8 bits."""
    return packed.to(dtype).mul_(scales.view(torch.float32) / _LARGEST)


class _Product8bit(torch.autograd.Function):
    """`W x` with a W in 8 bits, which is dequantized in both passes, as bitsandbytes trains on CPUs.

    Its kernels for GPUs also round `x` to 8 bits. The log-probabilities would not be those of an engine.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
        ctx.stored = packed, scales
        return nn.functional.linear(x, _numbers(packed, scales, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        packed, scales = ctx.stored
        return gradient @ _numbers(packed, scales, gradient.dtype), None, None


class Quantizing:
    """Fills a quantized layer from the rows of its weight that this rank reads."""

    squared_error: float = 0.0
    """Sum over this rank's rows. Double quantization changes it in the third digit, which is not counted."""
    squared_weight: float = 0.0

    def __init__(self, layer: QuantizedLinear, *, is_kept: bool = False) -> None:
        self.layer = layer
        self.is_kept = is_kept
        """Whether the weight is in 4 bits in its file, and stays as it is."""
        self.shape = torch.Size((layer.out_features, layer.in_features))
        self._scales: Tensor | None = None
        lora = getattr(layer, "lora", None)
        self._lora = lora if isinstance(lora, LowRank) and lora.config.init == "loftq" else None
        self._weight: Tensor | None = None

    def leave_adapter(self) -> None:
        """Find no start for the adapter, which a checkpoint holds."""
        self._lora = None

    @property
    def device(self) -> torch.device:
        packed = self.layer.packed
        return torch.device(packed.device_mesh.device_type) if isinstance(packed, DTensor) else packed.device

    @property
    def _blocks(self) -> int:
        """Blocks of a row."""
        return 1 if self.layer.levels == INT8 else self.shape[1] // BLOCK

    @property
    def index(self) -> Index:
        """This rank's part of the weight."""
        rows, _ = index_of(self.layer.packed)
        return rows, slice(0, self.shape[1])

    @torch.no_grad()
    def take(self, source: Packed) -> bool:
        """Take this rank's rows of a weight that a file holds in 4 bits, if they stay as they are."""
        if not self.is_kept:
            return False
        layer, (rows, _) = self.layer, self.index
        values, blocks = (slice(rows.start * width, rows.stop * width) for width in (self.shape[1], self._blocks))
        local(layer.packed).copy_(source.codes[values.start // 2 : values.stop // 2].view(local(layer.packed).shape))
        scales = source.scales[blocks].view(torch.uint8)
        local(layer.scales).copy_(scales.view(local(layer.scales).shape))
        if source.double is not None:
            layer.scales_of_scales.copy_(source.double[0])
            layer.scale_levels.copy_(source.double[1])
            layer.mean_of_scales.fill_(source.double[2])
        return True

    @torch.no_grad()
    def put(self, index: Index, values: Tensor) -> None:
        """Quantize `values`, which are at `index` in the whole weight: whole rows."""
        if self._scales is None:
            self._scales = self._new_scales()
            self._weight = None if self._lora is None else self._new_rows(self.shape[1])
        rows, _ = index
        if self._weight is not None:
            put(self._weight, index, values)
        device = local(self._scales).device
        step = max(1, _AT_ONCE // self.shape[1])
        for start in range(rows.start, rows.stop, step):
            at = slice(start, min(start + step, rows.stop))
            part = values[at.start - rows.start : at.stop - rows.start].to(device)
            packed, scales, values_of = self._quantized(part)
            put(self.layer.packed, (at, slice(0, packed.shape[1])), packed)
            put(self._scales, (at, slice(0, self._blocks)), scales)
            error = values_of.sub_(part)
            self.squared_error += float(error.square_().sum(dtype=torch.float64))
            self.squared_weight += float(part.float().square().sum(dtype=torch.float64))

    def _quantized(self, part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Some rows, packed, their float32 scales, and the numbers that both stand for."""
        functional = bitsandbytes_package().functional
        if self.layer.levels == INT8:
            packed, scales, _ = functional.int8_vectorwise_quant(part.to(torch.float16))
            return packed, scales[:, None], _numbers(packed, scales[:, None], torch.float32)
        packed, state = functional.quantize_4bit(part, blocksize=BLOCK, quant_type=self.layer.levels)
        values = functional.dequantize_4bit(packed, state).float()
        return packed.view(len(part), -1), state.absmax.view(len(part), -1), values

    @torch.no_grad()
    def finish(self) -> None:
        """Store the scales, when all rows have been put. Collective."""
        # A rank may have no rows.
        whole = full_tensor(self._new_scales() if self._scales is None else self._scales)
        self._scales = None
        self._store_scales(whole)
        if self._lora is not None:
            weight = full_tensor(self._new_rows(self.shape[1]) if self._weight is None else self._weight)
            self._weight = None
            self._lora.approximate(weight.sub_(self.layer.full_weight()))

    def _store_scales(self, whole: Tensor) -> None:
        layer = self.layer
        if not layer.is_double:
            put_own(layer.scales, whole.view(torch.uint8))
            return
        mean = whole.flatten().mean()
        fine, state = bitsandbytes_package().functional.quantize_blockwise(
            whole.flatten() - mean, blocksize=SCALES_BLOCK
        )
        put_own(layer.scales, fine.view(whole.shape))
        layer.scales_of_scales.copy_(state.absmax)
        layer.mean_of_scales.copy_(mean)
        layer.scale_levels.copy_(state.code)

    def _new_scales(self) -> Tensor:
        return self._new_rows(self._blocks)

    def _new_rows(self, width: int) -> Tensor:
        """Room for float32 numbers, sharded as the weight."""
        packed, shape = self.layer.packed, (self.shape[0], width)
        if not isinstance(packed, DTensor):
            return torch.empty(shape, device=packed.device)
        return distributed.zeros(shape, device_mesh=packed.device_mesh, placements=packed.placements)


def quantize_layers(model: PreTrainedModel, config: QuantizationConfig) -> dict[str, Quantizing]:
    """Convert the frozen linear layers of the decoder blocks of `model`, which has no values yet. Returns what fills
    them, by the name of the weight.

    Embeddings, head, norms and routers stay, and layers whose rows are not whole blocks.

    Raises:
        ModelError: there is no such layer.
    """
    chosen = dict(_frozen_linears(model))
    fitting = {path: layer for path, layer in chosen.items() if layer.in_features % BLOCK == 0}
    if not fitting:
        raise ModelError(
            f"model.quantization: {type(model).__name__} has no frozen linear layer with rows of {BLOCK} n"
        )
    return {
        f"{path}.weight": Quantizing(QuantizedLinear.convert(layer, config.type, config.double and config.type != INT8))
        for path, layer in fitting.items()
    }


def keep_quantized(
    model: PreTrainedModel, packed: Mapping[str, Packed], changed: Container[str]
) -> dict[str, Quantizing]:
    """Convert the layers whose weights are `packed` in the files, likewise. Those that are trained, or whose rows are
    not whole blocks, are read as numbers. The `changed` ones, into which an adapter is merged, are quantized again.
    """
    found: dict[str, Quantizing] = {}
    for path, layer in _frozen_linears(model):
        source = packed.get(name := f"{path}.weight")
        if source is not None and source.block == BLOCK and layer.in_features % BLOCK == 0:
            made = QuantizedLinear.convert(layer, source.kind, source.double is not None, source.dtype)
            found[name] = Quantizing(made, is_kept=name not in changed)
    return found


def _frozen_linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    shared = {name for names in names_of_shared(model) for name in names}
    blocks = {id(module) for block in decoder_blocks(model) for module in block.modules()}
    for path, module in model.named_modules():
        if not is_plain_linear(module) or id(module) not in blocks or module.weight.requires_grad:
            continue
        parent, _, name = path.rpartition(".")
        is_router = name in ("gate", "router")
        owner_class: Any = type(model.get_submodule(parent))  # Any: mypy takes no class of modules for hashable
        # Kernels of state spaces read the weights of their layers.
        is_read = re.search(rf"\bself\.{name}\.weight\b", source_of(owner_class)) is not None
        if not (is_router or f"{path}.weight" in shared or is_read):
            yield path, module


def scale_names(model: nn.Module) -> set[str]:
    """Names of the scales, which are no part of the model's hub format."""
    return {f"{path}.scales" for path, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def log_quantization(layers: Mapping[str, Quantizing], process: Process) -> None:
    """Log how much memory the filled layers take, and how far they are from the weights of the files. Collective."""
    sums = [sum(each.squared_error for each in layers.values()), sum(each.squared_weight for each in layers.values())]
    total = torch.tensor(sums, dtype=torch.float64, device=process.device)
    dist.all_reduce(total)
    values = sum(each.shape.numel() for each in layers.values())
    held = sum(each.layer.packed.numel() + each.layer.scales.numel() for each in layers.values())
    if process.is_main:
        squared_error, squared_weight = total.tolist()
        error = f"relative error of the weights {(squared_error / squared_weight) ** 0.5:.3f}" if squared_weight else ""
        kind = next(iter(layers.values())).layer.levels.upper()
        get_logger().info(
            f"Quantization: {len(layers)} linear layers in {kind}, {8 * held / values:.2f} bits per weight "
            f"({held / 2**20:,.0f} MiB; in bfloat16 {2 * values / 2**20:,.0f}); {error or 'as in the files'}"
        )
