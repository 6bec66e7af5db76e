"""Products of bfloat16 matrices on a CPU, computed in float32.

Some processors multiply bfloat16 at half the rate of float32: those of Intel with AVX-512 BF16 whose AMX is absent or
hidden by a virtual machine. Others have no instruction for it at all. There it is faster to convert the factors, which
takes far less time than the product. The results are rounded to bfloat16 once, as those of bfloat16 kernels are, which
accumulate in float32 too. `product_choice` measures which way is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]
"""Computes `a @ b.T`, without a gradient."""

MOST_ELEMENTS = 1 << 22
"""Elements of a factor that are in float32 at a time, 16 MiB, so that the head of a large vocabulary takes no more."""


@dataclass(frozen=True, slots=True)
class _InFloat32:
    """A value, so that two of the same product are equal."""

    product: Product
    most_elements: int

    def __call__(self, a_NK: Tensor, b_MK: Tensor) -> Tensor:
        if a_NK.dtype != torch.bfloat16:
            return self.product(a_NK, b_MK)
        rows, columns, inner = len(a_NK), len(b_MK), a_NK.shape[1]
        if inner * max(rows, columns) <= self.most_elements:
            return self.product(a_NK.float(), b_MK.float()).to(a_NK.dtype)
        if inner >= max(rows, columns):
            return self._summed(a_NK, b_MK)
        out = a_NK.new_empty(rows, columns)
        step = max(1, self.most_elements // inner)
        if rows >= columns:
            wide = b_MK.float()
            for part, own in zip(a_NK.split(step), out.split(step), strict=True):
                own.copy_(self.product(part.float(), wide))
        else:
            wide = a_NK.float()
            for part, own in zip(b_MK.split(step), out.split(step, dim=1), strict=True):
                own.copy_(self.product(wide, part.float()))
        return out

    def _summed(self, a_NK: Tensor, b_MK: Tensor) -> Tensor:
        """The product as a sum over parts of a long inner dimension."""
        step = max(1, self.most_elements // max(len(a_NK), len(b_MK)))
        total = torch.zeros(len(a_NK), len(b_MK))
        for a, b in zip(a_NK.split(step, dim=1), b_MK.split(step, dim=1), strict=True):
            total += self.product(a.float(), b.float())
        return total.to(a_NK.dtype)


def in_float32(product: Product, most_elements: int = MOST_ELEMENTS) -> Product:
    """A product that converts bfloat16 factors to float32, and its result back. Other dtypes go to `product`.

    It converts at most `most_elements` of a factor at a time.
    """
    return _InFloat32(product, most_elements)
