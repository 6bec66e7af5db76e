"""What the machine is, and what it can do: versions, matrix products, memory bandwidth."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch
from findings import Findings, findings_of_command_line

PACKAGES = ("torch", "transformers", "triton", "peft", "accelerate", "safetensors", "pydantic", "verifiers", "prime-rl")


def main(findings: Findings) -> None:
    findings.fact(python=platform.python_version(), **{name: version_of(name) for name in PACKAGES})
    findings.attempt("every room imports", rooms_import)
    findings.fact(**{name: float(f"{speed:.4g}") for name, speed in speeds(findings.device, findings.is_tiny).items()})
    if findings.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        findings.fact(
            gpu=properties.name,
            memory_gib=round(properties.total_memory / 2**30, 1),
            multiprocessors=properties.multi_processor_count,
            gpus=torch.cuda.device_count(),
            nccl=".".join(map(str, torch.cuda.nccl.version())),
        )


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def rooms_import() -> tuple[bool, str]:
    import prime_rl.entrypoints.rl
    import prime_rl.entrypoints.sft
    import prime_rl.inference.server
    import prime_rl.orchestrator.orchestrator
    import prime_rl.trainer.rl.train
    import prime_rl.trainer.sft.train

    return True, str(prime_rl.__path__[0])


def speeds(device: str, is_tiny: bool) -> dict[str, float]:
    """bf16 matrix products in TFLOP/s (random data), and a copy in TB/s, bytes read and written counted."""
    size, copied = (256, 1 << 20) if is_tiny else (8192, 1 << 32)
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = median_s(lambda: one @ other, device)
    source = torch.empty(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), device)
    return {
        "matmul_tflop_per_s": 2 * size**3 / seconds / 1e12,
        "copy_tb_per_s": 2 * copied / copy_s / 1e12,
    }


def median_s(action: Callable[[], object], device: str, count: int = 10) -> float:
    """Median seconds of `count` runs, after three that warm up."""
    seconds = []
    for number in range(count + 3):
        synchronize(device)
        started_s = time.perf_counter()
        action()
        synchronize(device)
        if number >= 3:
            seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(findings_of_command_line(__doc__))
