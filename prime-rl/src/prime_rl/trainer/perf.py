"""Measures the trainer's speed: tokens per second, MFU (fraction of the device's peak), memory."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from prime_rl.checks.model_description import ModelDescription
from prime_rl.trainer.kernels.attention import head_dims
from prime_rl.trainer.model.quantized import scale_names
from prime_rl.trainer.model.scoring import output_head
from prime_rl.trainer.model.vision import language_modules
from prime_rl.trainer.process.world import Process
from prime_rl.utils.logger import count_of, get_logger

_WINDOW_STEPS = 10
_MEASURED_S = 0.05
_GIB = 2**30
_PEAK_FLOPS = (
    ("A100", 312e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("B200", 2.25e15),
    ("MI300X", 1307.4e12),
    ("MI325X", 1307.4e12),
)
"""Dense bfloat16 peak in FLOP/s by device name. More specific names come first."""


class Throughput:
    """Tokens per second over a window of steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=_WINDOW_STEPS)

    def step(self, tokens: int, now_s: float | None = None) -> float | None:
        """Add a step that ended now. Returns the rate since the oldest step in the window; None for the first step."""
        self._steps.append((time.perf_counter() if now_s is None else now_s, tokens))
        elapsed_s = self._steps[-1][0] - self._steps[0][0]
        return sum(tokens for _, tokens in list(self._steps)[1:]) / elapsed_s if elapsed_s else None

    def leave_out(self, seconds: float) -> None:
        """Do not count the `seconds` that have just passed."""
        self._steps = deque(((end_s + seconds, tokens) for end_s, tokens in self._steps), maxlen=_WINDOW_STEPS)


def flops_per_token(model: PreTrainedModel, row_tokens: int) -> float:
    """FLOP of the forward and backward pass per token: `6 P + 12 L H Q T`. docs/monitors.md explains the symbols.

    A frozen parameter counts 4 instead of 6: it gets no gradient, but passes on that of its input.
    """
    heads = model.config.get_text_config().num_attention_heads
    return _matrix_flops(model) + 12 * heads * sum(head_dims(model.config)) * row_tokens


def published_peak(device: torch.device) -> Peak | None:
    """Peak of a GPU in bfloat16; None for a CPU or an unknown GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((Peak(flops) for known, flops in _PEAK_FLOPS if known in name), None)


@dataclass(slots=True)
class Peak:
    """The peak of one process, which no speed should exceed."""

    flops: float
    """FLOP/s."""
    dtype: torch.dtype | None = None
    """Dtype of the matrix products in which it was measured; None if it was published."""

    def rises(self) -> bool:
        """Measure again, and say whether the peak is higher. The first time, other programs may have had the cores."""
        if self.dtype is None or (now := measured_peak_flops(self.dtype)) <= self.flops:
            return False
        self.flops = now
        get_logger().info(f"Peak of a process: {now / 1e9:.0f} GFLOP/s, measured again, as a step exceeded the first")
        return True


def known_peak(process: Process, dtype: torch.dtype) -> Peak | None:
    """`published_peak`; on a CPU, the measured peak of matrix products in `dtype`, which is logged.

    All processes measure at the same time, because they share the cores.
    """
    if process.device.type != "cpu":
        return published_peak(process.device)
    peak = measured_peak_flops(dtype)
    if process.is_main:
        get_logger().info(
            f"Peak of a process: {peak / 1e9:.0f} GFLOP/s, measured now in {str(dtype).partition('.')[2]} matrix "
            f"products on {count_of('thread', torch.get_num_threads())}"
        )
    return Peak(peak, dtype)


def measured_peak_flops(dtype: torch.dtype) -> float:
    """FLOP/s of square matrix products on this process's CPU threads: the best one in a twentieth of a second.

    Other programs on the same cores lower the result.
    """
    size = 768
    one, other = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    best_s, end_s = float("inf"), time.perf_counter() + _MEASURED_S
    while (started_s := time.perf_counter()) < end_s:
        one @ other
        best_s = min(best_s, time.perf_counter() - started_s)
    return 2 * size**3 / best_s


class Performance:
    """Speed, MFU and memory metrics of each step, with the same names for every trainer."""

    def __init__(self, model: PreTrainedModel, row_tokens: int, process: Process, peak: Peak | None) -> None:
        """`row_tokens` is the length of a row. `peak` is None if it is unknown."""
        self.process = process
        self.total_memory_gib = total_memory_gib(process.device)
        self._throughput = Throughput()
        self._peak = peak
        self._flops = 0.0 if peak is None else flops_per_token(model, row_tokens)
        self._has_exceeded = False
        if peak is not None and process.is_main:
            heads = " and ".join(map(str, sorted({*head_dims(model.config)})))
            get_logger().info(
                f"MFU = {self._flops:.4g} FLOP per token * tokens/s / "
                f"({peak.flops:.4g} FLOP/s * {count_of('process', process.world_size, 'es')}) "
                f"with 6 P + 12 L H Q T FLOP per token, Q = {heads}, T = {row_tokens}"
            )

    def step(self, tokens: int) -> dict[str, float]:
        """Metrics of a step that ended now, with `tokens` tokens over all processes. The first step has no speed."""
        tokens_per_s = self._throughput.step(tokens)
        metrics = {"perf/peak_memory": peak_memory_gib(self.process.device)}
        if tokens_per_s is None:
            return metrics
        metrics |= {
            "perf/throughput": tokens_per_s,
            "perf/throughput_per_gpu": tokens_per_s / self.process.world_size,
        }
        if self._peak is not None and (mfu := self._mfu(tokens_per_s, self._peak)) is not None:
            metrics["perf/mfu"] = mfu
        return metrics

    def _mfu(self, tokens_per_s: float, peak: Peak) -> float | None:
        """MFU in percent. None if it is above 100, and would be no share of anything."""
        speed = self._flops * tokens_per_s / self.process.world_size
        if speed > peak.flops and not self._has_exceeded and not peak.rises():
            self._has_exceeded = True
            get_logger().warning(
                f"MFU would be {speed / peak.flops:.0%}, and is left out while it is above 100%: its FLOP per token "
                "count attention over whole rows, which short samples do not need"
            )
        return 100 * speed / peak.flops if speed <= peak.flops else None

    def leave_out(self, seconds: float) -> None:
        """Do not count the `seconds` that have just passed, as those of a validation."""
        self._throughput.leave_out(seconds)


def speed_fields(metrics: Mapping[str, float]) -> list[str]:
    """The speed fields of a step's log line."""
    known = (("perf/throughput", "Throughput: {:.0f} tokens/s"), ("perf/mfu", "MFU: {:.1f}%"))
    return [words.format(metrics[name]) for name, words in known if name in metrics]


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory so far: reserved on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / _GIB
    # Linux reports KiB, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB


def total_memory_gib(device: torch.device) -> float:
    """Total memory of the GPU, or of this machine on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / _GIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB


def _matrix_flops(model: PreTrainedModel) -> int:
    share = ModelDescription(model.config.to_dict()).visited_share
    head = list(output_head(model).parameters())
    total = sum(_flops_of(p) for p in head)
    # An embedding lookup is not a matrix product. The head, which may share its weight, is counted above.
    skipped = {id(p) for p in [*model.get_input_embeddings().parameters(), *head]}
    # Not those of a vision tower, which computes patches of images and no tokens.
    counted = {id(p) for _, module in language_modules(model) for p in module.parameters(recurse=False)}
    scales = scale_names(model)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or name in scales or id(parameter) in skipped or id(parameter) not in counted:
            continue
        total += int(_flops_of(parameter) * (share if ".experts." in name else 1))
    return total


def _flops_of(parameter: nn.Parameter) -> int:
    weights = 2 if parameter.dtype == torch.uint8 else 1  # in 4 bits, two of them are in a byte
    return (6 if parameter.requires_grad else 4) * weights * parameter.numel()
