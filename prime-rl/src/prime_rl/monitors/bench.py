"""Benchmark table: collects the metrics of each step and logs their statistics at the end."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Mapping, Sequence

from prime_rl.monitors.base import Metrics
from prime_rl.utils.logger import SUCCESS, get_logger

_WIDTH = 132
"""Table width in characters; fits five columns with their summaries."""

Measured = Mapping[str, Sequence[float]]
"""Values of the measured steps by metric name."""


class BenchTable:
    """A monitor that logs a table of all steps at the end, except the first one, which is a warm-up.

    `columns` maps metric names to column titles. Metrics that are missing from a step get no column.
    """

    def __init__(self, columns: Mapping[str, str], write: Callable[[Measured], None] = lambda measured: None) -> None:
        """`write` is also called with the measured values at the end."""
        self.columns = columns
        self._write = write
        self._steps: dict[int, Metrics] = {}

    def log(self, metrics: Metrics, step: int) -> None:
        # Only training steps have this metric; validation, for example, does not.
        if "time/step" in metrics:
            self._steps[step] = dict(metrics)

    def close(self, exit_code: int = 0) -> None:
        steps = sorted(self._steps)[1:]
        if exit_code != 0 or not steps:
            return
        measured = {
            name: [float(self._steps[step][name]) for step in steps]
            for name in self.columns
            if all(name in self._steps[step] for step in steps)
        }
        get_logger().log(SUCCESS, f"Benchmark\n{self._table(steps, measured)}")
        self._write(measured)

    def _table(self, steps: Sequence[int], measured: Measured) -> str:
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, show_footer=True)
        table.add_column("Step", footer="Overall")
        for name, values in measured.items():
            stats = summary(values)
            footer = f"{stats['mean']:.2f} ± {stats['std']:.2f} [{stats['min']:.2f}, {stats['max']:.2f}]"
            table.add_column(self.columns[name], footer=footer, justify="right")
        for index, step in enumerate(steps):
            table.add_row(str(step), *(f"{values[index]:.2f}" for values in measured.values()))
        text = io.StringIO()
        Console(file=text, width=_WIDTH).print(table)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, population standard deviation, minimum and maximum."""
    return {
        "mean": statistics.fmean(values),
        "std": statistics.pstdev(values),
        "min": min(values),
        "max": max(values),
    }
