"""Compares the estimated memory of a trainer process with the measured one, over a grid of models and settings.

    uv run benchmarks/memory/estimate.py [--only TEXT …] [--worst-percent 10]     # on the CPU, a few minutes
    uv run benchmarks/memory/estimate.py --device cuda                          # on a GPU

On the CPU each case runs twice: with the operations that a GPU would run, and with our kernels for CPUs. Measured is
what PyTorch's allocator has given out at the peak of the second step, to the byte; the reserves for CUDA and Python are
left out of both sides. `rest` is activations, loss and buffers together. Exit code 1 if a total is off by more than
`--worst-percent`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from cases import Case, grid  # noqa: E402

if TYPE_CHECKING:
    from prime_rl.trainer.process.mesh import Mesh

_MB = 1e6


@dataclass(frozen=True)
class Result:
    """One case, in bytes."""

    case: Case
    estimated_rest: int
    measured_rest: int
    estimated: int
    measured: int

    @property
    def error(self) -> float:
        return self.estimated / self.measured - 1

    @property
    def row(self) -> str:
        kernels = "GPU's" if self.case.as_on_gpu else "CPU's"
        sizes = (self.estimated_rest, self.measured_rest, self.estimated, self.measured)
        return f"| {self.case.name} | {kernels} | {' | '.join(f'{s / _MB:.1f}' for s in sizes)} | {self.error:+.1%} |"


def compare(case: Case, device: str) -> Result:
    """Estimate and measure one case, in a world of its own."""
    from prime_rl.trainer.process.mesh import ParallelDims
    from prime_rl.trainer.process.world import destroy_world, setup_world

    process = setup_world(device, timeout_s=60, environ={})
    try:
        return compared(case, ParallelDims(1, 1).mesh(process))
    finally:
        destroy_world()


def compared(case: Case, mesh: Mesh) -> Result:
    """Estimate and measure one case with the only process of `mesh`."""
    with tempfile.TemporaryDirectory() as folder:
        return _compared(case, mesh, Path(folder))


def _compared(case: Case, mesh: Mesh, folder: Path) -> Result:
    from trainer_peaks import measure

    from prime_rl.checks.memory import ModelShape
    from prime_rl.checks.memory.training import Training, peak_memory

    config, measured = measure(case, mesh, folder)
    training = Training(
        ModelShape.of(config.name),
        config,
        case.optimizer,
        case.seq_len * case.micro_batch,
        case.seq_len,
        1,
        case.rows if case.kind == "sft" else None,
        "cuda" if case.as_on_gpu else "cpu",
        case.kind == "rl",
        is_rounded=case.is_rounded,
        is_beside_sampler=case.top_k > 0,
    )
    estimated = sum(peak_memory(training).values())
    # Gradients count in full on both sides, although some cases have none at their peak.
    fixed = training.weights + training.gradients + training.states
    return Result(case, estimated - fixed, measured.rest, estimated, measured.peak)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these texts")
    parser.add_argument("--worst-percent", type=float, default=10.0)
    args = parser.parse_args()
    # Before torch is loaded.
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    from prime_rl.checks.model_files import no_quantization

    cases = [
        case
        for case in grid()
        if any(text in case.name for text in args.only)
        and (args.device == "cpu" or case.as_on_gpu)
        and not ("quantization" in case.settings and no_quantization())
    ]
    print("| case | kernels | rest, estimated | measured | all, estimated | measured (MB) | error |")
    print("|---|---|---|---|---|---|---|", flush=True)
    errors = []
    for case in cases:
        result = compare(case, args.device)
        errors.append(abs(result.error))
        print(result.row, flush=True)
    print(f"\n{len(errors)} cases: median {statistics.median(errors):.2%}, worst {max(errors):.1%}")
    return int(max(errors) > args.worst_percent / 100)


if __name__ == "__main__":
    sys.exit(main())
