"""Key-value cache of the running sequences: one row (slot) per sequence, row i for running sequence i."""

from __future__ import annotations

import torch
from torch import Tensor

from prime_rl.inference.embedded.sizes import rounded_up
from prime_rl.inference.embedded.transfer import on_device

_LENGTH_STEP = 32
_ROW_STEP = 16
_AMPLE_LENGTH_STEP = 128


class KVSlots:
    """Key and value tensors `[rows, kv heads, length, head dim]` of every layer, grown on demand.

    The tensors are initialized to zeros: masked positions are multiplied by 0, which would not remove a NaN.
    """

    def __init__(self, budget_bytes: int, device: torch.device) -> None:
        self.budget_bytes = budget_bytes
        self.device = device
        self.rows = 0
        self.length = 0
        self.generation = 0
        """Changes whenever tensors are replaced: their addresses in a captured graph are then those of freed memory."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def bytes_per_token(self) -> int:
        """Size of one token of one sequence across all layers; 0 before the first forward pass."""
        tensors = [tensor for pair in self._layers.values() for tensor in pair]
        return sum(tensor.shape[1] * tensor.shape[3] * tensor.element_size() for tensor in tensors)

    def fits(self, rows: int, length: int) -> bool:
        """Whether `rows` sequences of up to `length` tokens fit in the memory budget."""
        return self._rounded_rows(rows) * self._rounded_length(length) * self.bytes_per_token <= self.budget_bytes

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` sequences of up to `length` tokens, keeping stored tokens.

        If keeping the larger of the old and new size in both dimensions would exceed the budget, the tensors are
        resized to exactly the requested size, so one dimension may shrink. On a GPU, the length doubles if that fits:
        attention reads no more for it, and every new size costs all captured graphs.
        """
        if rows <= self.rows and length <= self.length:
            return
        widest = max(rows, self.rows), max(length, self.length)
        if self.fits(*widest):
            rows, length = widest
        ample = rounded_up(length, _AMPLE_LENGTH_STEP, steps_per_doubling=1)
        if self.device.type == "cuda" and self.fits(rows, ample):
            length = ample
        rows, length = self._rounded_rows(rows), self._rounded_length(length)
        for index, pair in self._layers.items():
            self._layers[index] = (self._resized(pair[0], rows, length), self._resized(pair[1], rows, length))
        self.rows, self.length = rows, length
        self.generation += 1

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer. New tensors `[tokens, kv heads, head dim]` set the shapes and the dtype."""
        if index not in self._layers:
            shapes = [(self.rows, new.shape[1], self.length, new.shape[2]) for new in (key, value)]
            self._layers[index] = (key.new_zeros(shapes[0]), value.new_zeros(shapes[1]))
            self.generation += 1
        return self._layers[index]

    def copy(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` tokens of one row to other rows."""
        # A list as an index would be copied to the device for every tensor.
        into = targets[0] if len(targets) == 1 else on_device(targets, self.device)
        for pair in self._layers.values():
            for tensor in pair:
                # PyTorch refuses to copy between views that share memory if both are dense, as whole rows are.
                tensor[into, :, :length] = tensor[source, :, :length].clone()

    def erase(self, row: int) -> None:
        """Overwrite a row with zeros."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor[row].zero_()

    def read_row(self, row: int, length: int) -> list[Tensor]:
        """Copy out the first `length` tokens of a row: key and value tensors [kv heads, length, head dim] per layer."""
        return [tensor[row, :, :length].clone() for pair in self._layers.values() for tensor in pair]

    def write_row(self, tensors: list[Tensor], row: int, length: int) -> None:
        """Write the first `length` tokens of tensors from `read_row` into a row."""
        own = [tensor for pair in self._layers.values() for tensor in pair]
        for tensor, copied in zip(own, tensors, strict=True):
            tensor[row, :, :length] = copied[:, :length]

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
        """At most 31 tokens or a quarter more. Attention reads whole rows, so a short step of growth saves time; the
        steps become longer with the rows, so that sequences are copied a few times only."""
        return rounded_up(length, _LENGTH_STEP, steps_per_doubling=4)
