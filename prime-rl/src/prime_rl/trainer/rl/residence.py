"""Where a trainer's weights and optimizer states are: on the GPU, or in host memory while an engine samples there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from prime_rl.trainer.process.world import Process


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

    On the GPU a storage is emptied and filled again, so parameters, FSDP's views of them and optimizer states remain
    the same objects. While they are away, they show the host's copy: checkpoints and exports read them as always.
    """

    def __init__(self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer], process: Process) -> None:
        self._models = list(models)
        self._optimizers = list(optimizers)
        self._process = process
        self._rooms: dict[tuple[int, int], Tensor] = {}
        """Host memory that has been allocated, by the address of a storage object and its size."""
        self._moved: list[_Moved] = []
        self._shown: list[Callable[[], None]] = []
        """Each makes a tensor show its memory on the GPU again."""

    def __str__(self) -> str:
        host, left = sum(room.nbytes for room in self._rooms.values()), torch.cuda.memory_reserved(self._process.device)
        return f"{host / 2**30:.2f} GiB of the trainer in host memory, {left / 2**30:.2f} GiB still on the GPU"

    @torch.no_grad()
    def leave(self) -> None:
        """Give the memory back. Returns when it is free on all processes. Collective."""
        if self._moved:
            return
        by_storage: dict[int, _Moved] = {}
        shown: list[tuple[Tensor, Tensor, Tensor]] = []
        for tensor in self._tensors():
            part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            storage = part.untyped_storage()
            if part.device.type != "cuda" or storage.nbytes() == 0:
                continue
            if storage._cdata not in by_storage:
                by_storage[storage._cdata] = self._copied(storage)
            host = by_storage[storage._cdata].on_host.untyped_storage()
            view = torch.empty(0, dtype=part.dtype).set_(host, part.storage_offset(), part.size(), part.stride())
            shown.append((tensor, part if isinstance(tensor, DTensor) else part.data, view))
        torch.cuda.synchronize(self._process.device)
        for tensor, part, view in shown:
            _show(tensor, view)
            self._shown.append(partial(_show, tensor, part))
        self._moved = list(by_storage.values())
        for moved in self._moved:
            moved.storage.resize_(0)
        torch.cuda.empty_cache()
        if self._process.world_size > 1:
            dist.barrier()

    @torch.no_grad()
    def come_back(self) -> None:
        """Take the memory again."""
        for moved in self._moved:
            moved.storage.resize_(moved.on_host.nbytes)
            moved.on_gpu.copy_(moved.on_host, non_blocking=True)
        for show in self._shown:
            show()
        self._moved, self._shown = [], []

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
        for optimizer in self._optimizers:
            for states in optimizer.state.values():
                # Counters of steps have no dimension, and stay.
                yield from (state for state in states.values() if isinstance(state, Tensor) and state.ndim)


def _show(tensor: Tensor, part: Tensor) -> None:
    if isinstance(tensor, DTensor):
        tensor._local_tensor = part
    else:
        tensor.data = part
