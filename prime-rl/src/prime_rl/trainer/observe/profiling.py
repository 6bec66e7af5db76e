"""Profiles a run: a trace of a few steps, and snapshots of the GPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import torch

from prime_rl.configs.trainer import NO_MEMORY_PROFILE
from prime_rl.trainer.process.errors import DeviceError
from prime_rl.trainer.process.world import Process
from prime_rl.utils.logger import get_logger

_MAX_MEMORY_EVENTS = 100_000


class Profile:
    """Records the profiles whose directories are set, on every rank, inside `recording`."""

    def __init__(self, trace_path: Path | None, memory_profiler_path: Path | None, process: Process) -> None:
        """
        Raises:
            DeviceError: a memory profile is requested, but the run has no GPU.
        """
        if memory_profiler_path is not None and process.device.type != "cuda":
            raise DeviceError(NO_MEMORY_PROFILE)
        self.trace_path = trace_path
        self.memory_profiler_path = memory_profiler_path
        self.process = process
        self._on_step: list[Callable[[int], None]] = []

    def step(self, step: int) -> None:
        """Call it at the end of each step. Steps count from 0."""
        for listener in self._on_step:
            listener(step)

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.memory_profiler_path is not None:
                stack.enter_context(self._memory_snapshots(self.memory_profiler_path))
            if self.trace_path is not None:
                stack.enter_context(self._trace(self.trace_path))
            yield

    @contextmanager
    def _trace(self, directory: Path) -> Iterator[None]:
        """Write `rank_<r>.json.gz` in Chrome's trace format, with a mark for each step. Open it at ui.perfetto.dev."""
        directory.mkdir(parents=True, exist_ok=True)
        target = directory / f"rank_{self.process.rank}.json.gz"
        with torch.profiler.profile(record_shapes=True) as profiler, ExitStack() as mark:
            numbers = count()

            def mark_next(done: int = -1) -> None:
                mark.close()
                mark.enter_context(torch.profiler.record_function(f"traced step {next(numbers)}"))

            mark_next()
            self._on_step.append(mark_next)
            yield
        profiler.export_chrome_trace(str(target))
        if self.process.is_main:
            get_logger().info(f"Wrote the trace {target}; open it at ui.perfetto.dev")

    @contextmanager
    def _memory_snapshots(self, directory: Path) -> Iterator[None]:
        """Write `rank_<r>_step_<n>.pickle` after each step. Open it at pytorch.org/memory_viz."""
        directory.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)

        def snapshot(step: int) -> None:
            torch.cuda.memory._dump_snapshot(str(directory / f"rank_{self.process.rank}_step_{step}.pickle"))

        self._on_step.append(snapshot)
        try:
            yield
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
