"""Metrics of a training step: collects values, gathers them over data ranks, computes statistics, and times phases."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from prime_rl.trainer.process.mesh import DataAxis

NAN = float("nan")


class MetricValues:
    """Values of a step per masked-in token or per sequence, by metric name."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add values: scalars or 1-D tensors."""
        for name, value in values.items():
            self._values[name].append(value.detach().float().reshape(-1))

    def extend(self, other: MetricValues) -> None:
        for name, values in other._values.items():
            self._values[name] += values

    def mean(self, name: str, data_axis: DataAxis, device: torch.device) -> float:
        """The mean over all data ranks of a metric that every rank has; NaN without values. Collective."""
        own = self._values[name]
        total, count = data_axis.sum([sum(v.double().sum().item() for v in own), sum(v.numel() for v in own)], device)
        return total / count if count else NAN

    def gather(self, data_axis: DataAxis) -> dict[str, Tensor]:
        """Gather the values of all data ranks on data rank 0; others get an empty dict. Collective."""
        own = {name: torch.cat(values).cpu() for name, values in self._values.items()}
        parts = data_axis.gather(own)
        if parts is None:
            return {}
        if len(parts) == 1:
            return own
        names = sorted({name for part in parts for name in part})
        return {name: torch.cat([part[name] for part in parts if name in part]) for name in names}


def statistics(name: str, values: Tensor) -> dict[str, float]:
    """Compute `<name>/{mean,median,std,min,max}`; all NaN if there are no values."""
    if values.numel() == 0:
        return {f"{name}/{statistic}": NAN for statistic in ("mean", "median", "std", "min", "max")}
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/median": values.median().item(),
        f"{name}/std": values.std(correction=0).item(),
        f"{name}/min": values.min().item(),
        f"{name}/max": values.max().item(),
    }


def training_metrics(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Statistics of every metric, and `kl_ent_ratio/mean`, the ratio of mismatch KL to entropy."""
    metrics: dict[str, float] = {}
    for name, value in values.items():
        metrics |= statistics(name, value)
    entropy, mismatch = metrics.get("entropy/mean", NAN), metrics.get("mismatch_kl/mean", NAN)
    return metrics | {"kl_ent_ratio/mean": mismatch / entropy if entropy else NAN}


class Stopwatch:
    """Measures the duration of a step's phases in seconds."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._phases: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._phases[phase] += time.perf_counter() - started_s

    def lap(self) -> dict[str, float]:
        """Return `time/step`, the time since the last lap, and `time/<phase>` for each phase. Starts the next lap."""
        now_s = time.perf_counter()
        times = {"time/step": now_s - self._started_s} | {f"time/{name}": s for name, s in self._phases.items()}
        self._started_s = now_s
        self._phases.clear()
        return times
