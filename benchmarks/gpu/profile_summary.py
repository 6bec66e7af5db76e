"""Where the time of a step goes: GPU kernels by what they do, and the share in which the GPU is idle."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import torch

KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("communication", ("nccl",)),
    ("attention", ("flash", "fmha", "attention", "flex", "sdpa")),
    ("products", ("gemm", "nvjet", "cutlass", "cublas", "xmma", "matmul", "mm_", "addmm", "mkldnn")),
    ("optimizer", ("adam", "multi_tensor", "foreach", "muon", "norm_kernel")),
    ("cross-entropy", ("softmax", "nll_loss", "logsumexp", "cross_entropy")),
    ("copies", ("memcpy", "memset", "copy_")),
)
"""Kinds of kernels and parts of their names, the first that fits. The rest is `elementwise`."""


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KINDS if any(part in name for part in parts)), "elementwise")


def shares_of_step(step: Callable[[], object], device: str) -> dict[str, float]:
    """Share of one step's wall time in each kind of kernel, and `idle`, in which no kernel runs.

    On a CPU, operators of PyTorch stand for kernels, and their own time counts.
    """
    on_gpu = device == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA] if on_gpu else [activity.CPU]) as profiler:
        started_s = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        elapsed_us = (time.perf_counter() - started_s) * 1e6
    if on_gpu:  # into the part's log: which kernels a kind consists of
        print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=14, max_name_column_width=90))
    spent_us: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        if event.is_user_annotation:  # spans kernels that count by themselves
            continue
        spent_us[kind_of(event.key)] += event.self_device_time_total if on_gpu else event.self_cpu_time_total
    shares = {kind: round(us / elapsed_us, 3) for kind, us in sorted(spent_us.items(), key=lambda item: -item[1])}
    return shares | {"idle": round(max(0.0, 1 - sum(spent_us.values()) / elapsed_us), 3)}


def bound_of(shares: dict[str, float], mfu: float) -> str:
    """What limits a step: `launch` if the GPU waits for a quarter of it, `compute` if products and attention fill most
    of it, else `memory`."""
    if shares.get("idle", 0) > 0.25:
        return "launch"
    busy = shares.get("products", 0) + shares.get("attention", 0)
    return "compute" if busy > 0.6 or mfu > 0.4 else "memory"
