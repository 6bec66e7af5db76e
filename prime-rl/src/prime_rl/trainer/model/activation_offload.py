"""Activations in host memory between the forward and the backward pass.

Copies run on a stream of their own, beside the computation. In the forward pass, the newest
`max_inflight_activations` stay on the device until their copies are done; in the backward pass, as many are fetched
ahead of their use.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from prime_rl.configs.trainer import ActivationOffloadingConfig

MIN_BYTES = 1024
"""Smaller tensors cost more to move than they take."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Stored:
    """An activation in host memory; for a while on the device too."""

    host: Tensor
    on_device: Tensor | None
    copied: torch.cuda.Event | None
    """The latest copy, in either direction, is done."""
    before: weakref.ref[Stored] | None
    """The one that was stored before, which the backward pass wants next."""


class ActivationOffload:
    """Hooks that move what autograd saves to host memory and back.

    It works on a CPU as well, where it copies for nothing, to the same results.
    """

    def __init__(self, config: ActivationOffloadingConfig, device: torch.device) -> None:
        self.device = device
        self.max_inflight = config.max_inflight_activations
        self.is_pinned = config.pin_memory and device.type == "cuda"
        self.moved_bytes = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._inflight: deque[Stored] = deque()
        self._newest: weakref.ref[Stored] | None = None

    def hooks(self) -> AbstractContextManager[Any]:
        """Within this, large tensors that autograd saves go to host memory; parameters stay."""
        return saved_tensors_hooks(self._store, self._restore)

    def _store(self, tensor: Tensor) -> Tensor | Stored:
        if not self._is_worth_moving(tensor):
            # The tensor itself would hold the graph that holds it.
            return tensor.detach()
        while len(self._inflight) >= self.max_inflight:
            self._release(self._inflight.popleft())
        host = torch.empty_like(tensor, device="cpu", pin_memory=self.is_pinned, requires_grad=False)
        with self._copying() as done:
            host.copy_(tensor.detach(), non_blocking=True)
        stored = Stored(host, tensor.detach(), done, self._newest)
        self._newest = weakref.ref(stored)
        self._inflight.append(stored)
        self.moved_bytes += host.nbytes
        return stored

    def _restore(self, stored: Tensor | Stored) -> Tensor:
        if not isinstance(stored, Stored):
            return stored
        if self._inflight:
            self._end_of_forward()
        on_device = self._fetched(stored)
        ahead = stored
        for _ in range(self.max_inflight - 1):
            before = ahead.before() if ahead.before is not None else None
            if before is None:
                break
            ahead = before
            self._fetched(ahead)
        self._wait(stored)
        return on_device

    def _is_worth_moving(self, tensor: Tensor) -> bool:
        owner = tensor if tensor._base is None else tensor._base
        is_activation = tensor.device.type == self.device.type and not isinstance(owner, nn.Parameter)
        return is_activation and tensor.nbytes >= MIN_BYTES

    def _end_of_forward(self) -> None:
        """Those still on the device are wanted first: they need no copy back."""
        for stored in self._inflight:
            self._wait(stored)
        self._inflight.clear()

    def _release(self, stored: Stored) -> None:
        # Whatever gets this memory next is computed after the copy.
        self._wait(stored)
        stored.on_device = None

    def _fetched(self, stored: Stored) -> Tensor:
        if stored.on_device is None:
            # Allocated for the stream that uses and frees it.
            stored.on_device = torch.empty_like(stored.host, device=self.device)
            with self._copying() as stored.copied:
                stored.on_device.copy_(stored.host, non_blocking=True)
        return stored.on_device

    @contextmanager
    def _copying(self) -> Iterator[torch.cuda.Event | None]:
        """Run the block's copy behind what is computed so far; yields the event of its end."""
        if self._stream is None:
            yield None
            return
        done = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield done
            done.record(self._stream)

    def _wait(self, stored: Stored) -> None:
        if stored.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(stored.copied)
            stored.copied = None
