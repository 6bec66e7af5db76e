"""The table that ends a benchmark run."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Mapping, Sequence

from prime_rl.monitors.base import Metrics
from prime_rl.utils.logger import SUCCESS, get_logger

_WIDTH = 132
"""Characters; five columns of figures and their summaries."""

Measured = Mapping[str, Sequence[float]]
"""Values of the measured steps, by the name of their metric."""


class BenchTable:
    """A monitor that keeps the steps and logs a table of them at the end, less the first, which warms up.

    `columns` are metrics and their titles; a metric that no step has gets no column.
    """

    def __init__(self, columns: Mapping[str, str], write: Callable[[Measured], None] = lambda measured: None) -> None:
        """`write` gets the values as well, at the end."""
        self.columns = columns
        self._write = write
        self._steps: dict[int, Metrics] = {}

    def log(self, metrics: Metrics, step: int) -> None:
        # Validation and the like are no steps.
        if "time/step" in metrics:
            self._steps[step] = dict(metrics)

    def close(self, exit_code: int = 0) -> None:
        steps = sorted(self._steps)[1:]
        if exit_code != 0 or not steps:
            return
        measured = {
            name: [float(self._steps[step][name]) for step in steps]
            for name in self.columns
            if name in self._steps[steps[0]]
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
            of = summary(values)
            footer = f"{of['mean']:.2f} ± {of['std']:.2f} [{of['min']:.2f}, {of['max']:.2f}]"
            table.add_column(self.columns[name], footer=footer, justify="right")
        for index, step in enumerate(steps):
            table.add_row(str(step), *(f"{values[index]:.2f}" for values in measured.values()))
        text = io.StringIO()
        Console(file=text, width=_WIDTH).print(table)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation, least and most."""
    return {
        "mean": statistics.fmean(values),
        "std": statistics.pstdev(values),
        "min": min(values),
        "max": max(values),
    }
