"""The table that ends a benchmark run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from prime_rl.utils.logger import SUCCESS, get_logger
from prime_rl.utils.monitor import Metrics

COLUMNS = {"time/step": "Step time (s)", "perf/throughput": "Throughput (tokens/s)"}


class BenchTable:
    """A monitor that keeps the steps and logs a table of them at the end, less the first, which warms up."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, list[float]]] = []

    def log(self, metrics: Metrics, step: int) -> None:
        self._rows.append((step, [float(metrics[name]) for name in COLUMNS]))

    def close(self, exit_code: int = 0) -> None:
        measured = self._rows[1:]
        if exit_code == 0 and measured:
            get_logger().log(SUCCESS, f"Benchmark\n{table(measured)}")


def table(rows: Sequence[tuple[int, list[float]]]) -> str:
    """The steps, and mean ± standard deviation [least, most] of each column."""
    width = 34
    columns = list(zip(*(values for _, values in rows), strict=True))
    lines = [f"{'Step':>8}" + "".join(f"{title:>{width}}" for title in COLUMNS.values())]
    lines += [f"{step:>8}" + "".join(f"{value:>{width}.2f}" for value in values) for step, values in rows]
    summaries = [
        f"{statistics.fmean(each):.2f} ± {statistics.pstdev(each):.2f} [{min(each):.2f}, {max(each):.2f}]"
        for each in columns
    ]
    return "\n".join([*lines, f"{'Overall':>8}" + "".join(f"{summary:>{width}}" for summary in summaries)])
