"""Opens a trainer's monitors: metrics file, W&B, metrics server, heartbeat, benchmark table, and profiles of a few
steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from prime_rl.configs.trainer import NO_MEMORY_PROFILE, TrainerConfig
from prime_rl.monitors import JsonlMonitor, Metrics, Monitor, MultiMonitor
from prime_rl.monitors.base import BenchTable, Heartbeat, Measured, Relay, WithEvaluations, summary
from prime_rl.monitors.sinks import SinkRun, open_sinks
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.perf import total_memory_gib
from prime_rl.trainer.process.errors import TrainerError
from prime_rl.trainer.process.world import Process
from prime_rl.utils.errors import RunError
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import get_logger

if TYPE_CHECKING:
    from prime_rl.configs.sft import SFTConfig


_MAX_MEMORY_EVENTS = 100_000


class Profile:
    """Records the profiles whose directories are set, on every rank, inside `recording`."""

    def __init__(self, trace_path: Path | None, memory_profiler_path: Path | None, process: Process) -> None:
        """
        Raises:
            TrainerError: a memory profile is requested, but the run has no GPU.
        """
        if memory_profiler_path is not None and process.device.type != "cuda":
            raise TrainerError(NO_MEMORY_PROFILE)
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


BENCH_COLUMNS = {
    "perf/throughput": "Throughput (tokens/s)",
    "perf/mfu": "MFU (%)",
    "time/step": "Step time (s)",
    "perf/peak_memory": "Peak memory (GiB)",
}


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The monitor, which is fed on rank 0, and the profile, which every rank has."""

    monitor: Monitor
    profile: Profile


class HeartbeatMonitor:
    """Sends a heartbeat at the end of each step."""

    def __init__(self, url: str) -> None:
        self._heartbeat = Heartbeat(url)

    def log(self, metrics: Metrics, step: int) -> None:
        self._heartbeat.beat()

    def close(self, exit_code: int = 0) -> None:
        self._heartbeat.close()


@contextmanager
def open_telemetry(config: SFTConfig | TrainerConfig, paths: RunPaths, process: Process) -> Iterator[Telemetry]:
    """Open everything that `config` asks for and close it at the end, with exit code 1 if the block raises.

    Raises:
        TrainerError: a monitor cannot be opened.
    """
    profile = Profile(config.trace_path, config.memory_profiler_path, process)
    try:
        monitor = MultiMonitor(list(_monitors(config, paths, process)))
    except RunError as error:
        raise TrainerError(str(error)) from error
    try:
        yield Telemetry(monitor, profile)
    except BaseException:
        monitor.close(exit_code=1)
        raise
    monitor.close()


def _monitors(config: SFTConfig | TrainerConfig, paths: RunPaths, process: Process) -> Iterator[Monitor]:
    server = config.metrics_server if isinstance(config, TrainerConfig) else None
    if server is not None and process.local_rank == 0:
        from prime_rl.monitors.prometheus import MetricsServer

        yield MetricsServer(server, has_metrics=process.is_main)
    if not process.is_main:
        return
    # `dpo` has the loop of `sft`, and so its metrics have the same source.
    component = config.component if isinstance(config, TrainerConfig) else "sft"
    yield JsonlMonitor(paths.metrics, component)
    resumes = config.ckpt is not None and config.ckpt.resume_step is not None
    run = SinkRun(component, paths, config.model_dump(mode="json"), resumes)
    sinks = open_sinks(config.wandb, config.monitor, run, paths.root)
    evaluates = not isinstance(config, TrainerConfig) and config.eval is not None
    yield WithEvaluations(sinks, Relay.of(paths, resumes)) if evaluates else sinks
    if config.heartbeat is not None:
        yield HeartbeatMonitor(config.heartbeat.url)
    if config.bench is not None:
        total_gib = total_memory_gib(process.device)
        yield BenchTable(BENCH_COLUMNS, partial(_write_bench, config.bench.output_json, total_gib))


def _write_bench(target: Path | None, total_gib: float, measured: Measured) -> None:
    """Write the results as JSON, if a file is given."""
    if target is None:
        return
    names = {"mfu": "perf/mfu", "throughput": "perf/throughput", "step_time": "time/step"}
    results = {name: summary(measured[metric]) for name, metric in names.items() if metric in measured}
    most_gib = max(measured["perf/peak_memory"])
    results["peak_memory"] = {"gib": most_gib, "pct": 100 * most_gib / total_gib}
    with replacing_file(target) as scratch:
        scratch.write_text(json.dumps(results, indent=2) + "\n")
