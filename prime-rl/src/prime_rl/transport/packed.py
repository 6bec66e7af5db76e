"""Reads weights that a checkpoint holds in 4 bits, in bitsandbytes' format, without bitsandbytes.

The values of a matrix, row after row, are divided into blocks. A value is one of 16 levels, times the scale of its
block. With double quantization a scale is a byte: one of 256 levels, times the scale of 256 scales, plus their mean.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prime_rl.checks.disk import PACKED_PARTS, PACKED_STATE

SCALES_BLOCK = 256
"""Scales with one scale."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix in a file in 4 bits. Read by an index, it is the numbers that it stands for, in float32."""

    codes: Any
    """Slice of a file, two values per byte, the first in the high bits."""
    scales: Any
    """Slice of a file: float32, or bytes with double quantization."""
    shape: torch.Size
    block: int
    """Values with one scale."""
    kind: str
    """bitsandbytes' name of the 16 levels: `nf4` or `fp4`."""
    levels: Tensor
    dtype: torch.dtype
    """That of the weights from which it was made."""
    double: tuple[Tensor, Tensor, float] | None
    """Of scales that are bytes: the scales of scales, what a byte stands for, and the mean."""

    @classmethod
    def of(cls, name: str, kind: str, held: dict[str, Any]) -> Packed:
        """Take the matrix `name` with all its parts out of `held`, which has slices by name."""
        state = json.loads(bytes(held.pop(f"{name}{PACKED_STATE}{kind}")[...].tolist()))
        parts = {part: held.pop(name + part, None) for part in PACKED_PARTS}
        nested = parts[".nested_absmax"]
        double = None
        if nested is not None:
            double = (nested[...].float(), parts[".nested_quant_map"][...].float(), float(state["nested_offset"]))
        return cls(
            held[name],
            parts[".absmax"],
            torch.Size(state["shape"]),
            int(state["blocksize"]),
            kind,
            parts[".quant_map"][...].float(),
            getattr(torch, state["dtype"]),
            double,
        )

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        rows, *others = (slice(None),) if index is ... else index
        start, stop, _ = rows.indices(self.shape[0])
        width = self.shape[1]
        first = start * width // self.block * self.block  # blocks may cross rows
        last = min(-(-stop * width // self.block) * self.block, self.shape.numel())
        packed = self.codes[first // 2 : -(-last // 2)].flatten()
        values = self.levels[torch.stack((packed >> 4, packed & 15), -1).flatten().int()][: last - first]
        scales = self._scales(first // self.block, -(-last // self.block))
        values = values * scales.repeat_interleave(self.block)[: last - first]
        own = values[start * width - first : stop * width - first].view(stop - start, width)
        return own[(slice(None), *others)]

    def _scales(self, start: int, stop: int) -> Tensor:
        stored: Tensor = self.scales[start:stop]
        if self.double is None:
            return stored
        of_scales, levels, mean = self.double
        numbers = torch.arange(start, stop) // SCALES_BLOCK
        return levels[stored.int()] * of_scales[numbers] + mean


def read_packed(held: dict[str, Any]) -> dict[str, Any]:
    """The slices of a checkpoint by name, with each matrix in 4 bits as one."""
    for name in [name for name in held if PACKED_STATE in name]:
        weight, _, kind = name.partition(PACKED_STATE)
        held[weight] = Packed.of(weight, kind, held)
    return held
