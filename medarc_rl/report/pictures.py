"""Draws the charts of a report as PNG files with matplotlib, which needs no browser."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from medarc_rl.report.charts import Chart
from prime_rl.utils.files import replacing_file

COLORS = ("#2563c9", "#c2570c", "#16803f", "#8b3fc4", "#b4235f", "#0e7f8c", "#7a6a00", "#59636f")
"""The palette of the page's light theme."""
HINT = "no PNGs: matplotlib is not installed; `uv sync --extra report` installs it"


class NoMatplotlib(Exception):
    """matplotlib is not installed. The message is one line."""


def draw_pictures(charts: Sequence[Chart], directory: Path) -> list[Path]:
    """Write a PNG for each chart. Raises NoMatplotlib, or OSError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib(HINT) from error
    written = []
    for chart in charts:
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        _draw(chart, figure.subplots())
        target = directory / f"{_file_name(chart.key)}.png"
        with replacing_file(target) as scratch:
            scratch.touch(mode=0o600)
            figure.savefig(scratch, format="png", dpi=120)
        written.append(target)
    return written


def _draw(chart: Chart, axes) -> None:  # type: ignore[no-untyped-def]
    # Titles are data: a dollar sign must not start a formula.
    shown = chart.as_json()
    if chart.is_stacked:
        steps = sorted({step for line in shown["lines"] for step, _ in line["points"]})
        rows = [[dict(line["points"]).get(step) or 0.0 for step in steps] for line in shown["lines"]]
        colors = [COLORS[line["color"] % len(COLORS)] for line in shown["lines"]]
        axes.stackplot(steps, rows, labels=[_plain(line["title"]) for line in shown["lines"]], colors=colors, alpha=0.8)
    else:
        for line in shown["lines"]:
            color = COLORS[line["color"] % len(COLORS)]
            values = [float("nan") if value is None else value for _, value in line["points"]]
            marker = "o" if len(values) <= 25 else None
            axes.plot(
                [step for step, _ in line["points"]],
                values,
                color=color,
                label=_plain(line["title"]),
                marker=marker,
                markersize=3,
                linewidth=1.5,
                linestyle="--" if line["dashed"] else "-",
            )
            if band := line.get("band"):
                rows = [row for row in band["rows"] if None not in row]
                axes.fill_between(*zip(*rows, strict=True), color=color, alpha=0.18, linewidth=0) if rows else None
    axes.set_title(_plain(f"{chart.title} ({chart.unit})" if chart.unit else chart.title), loc="left", fontsize=10)
    axes.set_xlabel(chart.x_title, fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    if len(shown["lines"]) > 1:
        axes.legend(fontsize=7, frameon=False)


def _plain(text: str) -> str:
    return text.replace("\\", "/").replace("$", "\\$")


def _file_name(key: str) -> str:
    return re.sub(r"[^\w.-]+", "-", key).strip("-.") or "chart"
