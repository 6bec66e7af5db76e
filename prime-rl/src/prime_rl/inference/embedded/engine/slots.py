"""Where the keys and values of running sequences live: one row a sequence, row i for the i-th running sequence."""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_LENGTH = 128
_ROW_STEP = 16


class KVSlots:
    """Key and value tensors `[rows, kv heads, length, head dim]` of every layer, grown when needed.

    The tensors start as zeros, because masked positions are multiplied by 0 and a NaN would survive that.
    """

    def __init__(self, budget_bytes: int, device: torch.device) -> None:
        self.budget_bytes = budget_bytes
        self.device = device
        self.rows = 0
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def bytes_per_token(self) -> int:
        """Of one token of one sequence in all layers; 0 before the first forward pass."""
        tensors = [tensor for pair in self._layers.values() for tensor in pair]
        return sum(tensor.shape[1] * tensor.shape[3] * tensor.element_size() for tensor in tensors)

    def fits(self, rows: int, length: int) -> bool:
        """Whether `rows` sequences of up to `length` tokens stay within the budget."""
        return self._rounded_rows(rows) * self._rounded_length(length) * self.bytes_per_token <= self.budget_bytes

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` sequences of up to `length` tokens; what they have stored stays.

        Beyond the budget, one side shrinks to what is asked for while the other grows.
        """
        if rows <= self.rows and length <= self.length:
            return
        widest = max(rows, self.rows), max(length, self.length)
        if self.fits(*widest):
            rows, length = widest
        rows, length = self._rounded_rows(rows), self._rounded_length(length)
        for index, pair in self._layers.items():
            self._layers[index] = (self._resized(pair[0], rows, length), self._resized(pair[1], rows, length))
        self.rows, self.length = rows, length

    def layer(self, index: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer; `like` is a new key tensor `[tokens, kv heads, head dim]` of it."""
        if index not in self._layers:
            shape = (self.rows, like.shape[1], self.length, like.shape[2])
            self._layers[index] = (like.new_zeros(shape), like.new_zeros(shape))
        return self._layers[index]

    def copy(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` tokens of one row to other rows."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor[targets, :, :length] = tensor[source, :, :length]

    def parts(self, row: int, length: int) -> list[Tensor]:
        """A copy of the first `length` tokens of a row: one tensor [kv heads, length, head dim] for each of ours."""
        return [tensor[row, :, :length].clone() for pair in self._layers.values() for tensor in pair]

    def put(self, parts: list[Tensor], row: int, length: int) -> None:
        """Write the first `length` tokens of such a copy into a row."""
        own = [tensor for pair in self._layers.values() for tensor in pair]
        for tensor, part in zip(own, parts, strict=True):
            tensor[row, :, :length] = part[:, :length]

    @staticmethod
    def _resized(tensor: Tensor, rows: int, length: int) -> Tensor:
        kept_rows, kept_length = min(rows, tensor.shape[0]), min(length, tensor.shape[2])
        resized = tensor.new_zeros((rows, tensor.shape[1], length, tensor.shape[3]))
        resized[:kept_rows, :, :kept_length] = tensor[:kept_rows, :, :kept_length]
        return resized

    @staticmethod
    def _rounded_rows(rows: int) -> int:
        return -(-rows // _ROW_STEP) * _ROW_STEP

    @staticmethod
    def _rounded_length(length: int) -> int:
        return max(_FIRST_LENGTH, 1 << (length - 1).bit_length())
