"""Where weights and optimizer states are: on the GPU, or in host memory while another process computes there.

A trainer leaves while an engine samples on its GPU, and an engine while the trainer computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import swap_tensors


@dataclass(frozen=True, slots=True)
class _Moved:
    """Memory of the GPU that has been given back, with its bytes in host memory."""

    on_gpu: Tensor
    """All bytes of a storage, which is empty."""
    on_host: Tensor

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.on_gpu.untyped_storage()


class Residence:
    """Moves models and the states of their optimizers between a GPU and pinned host memory, bit for bit.

    On the GPU a storage is emptied and filled again, so FSDP's views of it stay valid. Meanwhile parameters and states,
    which remain the same objects, hold the host's copy: checkpoints and exports read them as always.
    """

    def __init__(self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer], device: torch.device) -> None:
        self._models = list(models)
        self._optimizers = list(optimizers)
        self._device = device
        self._rooms: dict[tuple[int, int], Tensor] = {}
        """Host memory that has been allocated, by the address of a storage object and its size."""
        self._moved: list[_Moved] = []
        self._swapped: list[tuple[Tensor, Tensor]] = []
        """Tensors that are in host memory now, and what they were."""

    @torch.no_grad()
    def leave(self) -> None:
        """Give the memory back, and return when it is free."""
        if self._moved or self._device.type != "cuda":
            return
        by_storage: dict[int, _Moved] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        for tensor in self._tensors():
            part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            storage = part.untyped_storage()
            if part.device.type != "cuda" or storage.nbytes() == 0:
                continue
            if storage._cdata not in by_storage:
                by_storage[storage._cdata] = self._copied(storage)
            host = by_storage[storage._cdata].on_host.untyped_storage()
            copy = torch.empty(0, dtype=part.dtype).set_(host, part.storage_offset(), part.size(), part.stride())
            copies.append((tensor, _like(tensor, copy)))
        torch.cuda.synchronize(self._device)
        for tensor, copy in copies:
            swap_tensors(tensor, copy)
        self._swapped = copies
        self._moved = list(by_storage.values())
        for moved in self._moved:
            moved.storage.resize_(0)
        torch.cuda.empty_cache()

    def left_on_gpu(self) -> int:
        """Bytes of the GPU that this process has, without CUDA's own."""
        return torch.cuda.memory_reserved(self._device)

    @torch.no_grad()
    def come_back(self) -> None:
        """Take the memory again. What is queued on the GPU next waits for the copies, the host does not."""
        for moved in self._moved:
            moved.storage.resize_(moved.on_host.nbytes)
            moved.on_gpu.copy_(moved.on_host, non_blocking=True)
        for tensor, other in self._swapped:
            swap_tensors(tensor, other)
        self._moved, self._swapped = [], []

    def _copied(self, storage: torch.UntypedStorage) -> _Moved:
        size = storage.nbytes()
        on_gpu = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,), (1,))
        place = storage._cdata, size
        if place not in self._rooms:
            self._rooms[place] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._rooms[place].copy_(on_gpu, non_blocking=True)
        return _Moved(on_gpu, self._rooms[place])

    def _tensors(self) -> Iterator[Tensor]:
        for model in self._models:
            yield from model.parameters()
            yield from model.buffers()
        for optimizer in self._optimizers:
            for states in optimizer.state.values():
                # Counters of steps have no dimension, and stay.
                yield from (state for state in states.values() if isinstance(state, Tensor) and state.ndim)


def _like(tensor: Tensor, part: Tensor) -> Tensor:
    """A tensor of the same kind as `tensor`, whose part of this process is `part`."""
    whole = DTensor(part, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else part
    return nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole
