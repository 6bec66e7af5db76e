"""`torch.cuda`: devices, streams, memory."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

NAME, CAPABILITY, MEMORY_BYTES = "Simulated H100", (9, 0), 80 << 30


def num_devices() -> int:
    machine = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").iterdir())
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return machine if mask is None else min(machine, len([part for part in mask.split(",") if part.strip()]))


class Event:
    """Happens when it is recorded, because nothing of a stream is left to do."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.is_timing = enable_timing
        self.recorded_at_s: float | None = None

    def record(self, stream: Stream | None = None) -> Event:
        self.recorded_at_s = time.perf_counter()
        return self

    def wait(self, stream: Stream | None = None) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        if self.recorded_at_s is None:
            raise RuntimeError("waits for an event that nobody has recorded")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        if not (self.is_timing and end.is_timing) or self.recorded_at_s is None or end.recorded_at_s is None:
            raise RuntimeError("both events must be recorded, with enable_timing")
        return 1e3 * (end.recorded_at_s - self.recorded_at_s)


class Stream:
    """A name for the order in which everything is done anyway."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.cuda_stream = self.stream_id = id(self)

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event()).record()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Current:
    """The stream of the `with torch.cuda.stream(...)` around."""

    def __init__(self) -> None:
        self.default = self.stream = Stream()

    @contextmanager
    def be(self, stream: Stream | None) -> Iterator[None]:
        before, self.stream = self.stream, stream or self.stream
        try:
            yield
        finally:
            self.stream = before


def install() -> None:
    simulated, cuda = torch.ops.simulated_gpu, torch.cuda
    simulated.set_device_count(num_devices())
    cuda.is_available = lambda: num_devices() > 0
    cuda.device_count = num_devices
    cuda.is_initialized = lambda: True
    cuda.init = cuda._lazy_init = lambda: None
    cuda.current_device = simulated.current_device
    cuda.set_device = lambda device: simulated.set_device(torch.device(device).index or 0)
    cuda.device = lambda device: nullcontext()
    cuda.synchronize = lambda device=None: None
    cuda.get_device_capability = lambda device=None: CAPABILITY
    cuda.get_device_name = lambda device=None: NAME
    properties = SimpleNamespace(
        name=NAME, total_memory=MEMORY_BYTES, multi_processor_count=132, major=9, minor=0, L2_cache_size=50 << 20
    )
    cuda.get_device_properties = lambda device=None: properties
    cuda.is_bf16_supported = lambda *_, **__: True
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda = "13.0"
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: None
    cuda.set_sync_debug_mode = lambda mode: simulated.forbid_waiting(mode in (2, "error"))
    _install_streams()
    _install_memory()


def _install_streams() -> None:
    cuda, current = torch.cuda, _Current()
    cuda.Stream, cuda.Event, cuda.stream = Stream, Event, current.be
    cuda.current_stream = lambda device=None: current.stream
    cuda.default_stream = lambda device=None: current.default


def _install_memory() -> None:
    simulated, cuda = torch.ops.simulated_gpu, torch.cuda
    cuda.mem_get_info = lambda device=None: (MEMORY_BYTES - simulated.memory(False), MEMORY_BYTES)
    cuda.memory_allocated = cuda.memory_reserved = lambda device=None: simulated.memory(False)
    cuda.max_memory_allocated = cuda.max_memory_reserved = lambda device=None: simulated.memory(True)
    cuda.reset_peak_memory_stats = lambda device=None: simulated.forget_peak()
    cuda.memory_stats = lambda device=None: {}
    cuda.empty_cache = lambda: None
    resize_on_host = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, bytes_: int) -> Any:
        if self.device.type != "cuda":
            return resize_on_host(self, bytes_)
        owner: Tensor = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self, 0, (0,), (1,))
        simulated.resize_storage(owner, bytes_)
        return self

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
