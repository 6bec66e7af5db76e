"""Measures the cores' peak in bfloat16 matrix products, in GFLOP/s: `python matmul_peak.py RESULT.json`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch

SIZE, SECONDS = 2048, 4.0


def main(result: Path) -> None:
    left, right = torch.randn(SIZE, SIZE, dtype=torch.bfloat16), torch.randn(SIZE, SIZE, dtype=torch.bfloat16)
    out = torch.empty_like(left)
    times_s = []
    end_s = time.perf_counter() + SECONDS
    while time.perf_counter() < end_s:
        started_s = time.perf_counter()
        torch.mm(left, right, out=out)
        times_s.append(time.perf_counter() - started_s)
    result.write_text(json.dumps({"gflops": 2 * SIZE**3 / statistics.median(times_s) / 1e9}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
