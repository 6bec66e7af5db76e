"""Draws the results in `results` as one picture, and writes their table into the page: needs the extra `report`.

uv run --extra report benchmarks/growth/plot.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE / "README.md"
BEGIN, END = "<!-- results: written by plot.py -->", "<!-- end of results -->"
BEGIN_LONG_RUNS = "<!-- long runs: written by plot.py -->"
PANELS = {
    "packing": ("packing",),
    "preflight": ("preflight",),
    "reading": ("reading",),
    "resume": ("resume",),
    "report, watch": ("report", "watch"),
    "in flight": ("in-flight",),
    "checkpoints": ("checkpoint",),
    "layers": ("layers",),
}
COLUMNS = 4


def read_results(folder: Path = HERE / "results") -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def draw(results: Sequence[dict[str, Any]], out: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "growth"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, COLUMNS, figsize=(20, 9), layout="constrained")
    for panel, (title, prefixes) in zip(axes.flat, PANELS.items(), strict=True):
        own = [result for result in results if result["cost"].startswith(prefixes)]
        if not own:
            panel.set_title(f"{title}: not measured")
            panel.set_axis_off()
            continue
        for result in own:
            sizes = [point["size"] for point in result["points"]]
            slope = "no slope" if result["slope"] is None else f"slope {result['slope']:.2f}"
            label = f"{result['cost']}: {slope}"
            panel.loglog(sizes, [point["cpu_s"] for point in result["points"]], marker="o", markersize=4, label=label)
        _draw_linear(panel, own)
        panel.set_title(title)
        panel.set_xlabel(own[0]["of"])
        panel.set_ylabel("CPU time, s")
        panel.grid(visible=True, which="major", alpha=0.3)
        panel.legend(fontsize=8)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def _draw_linear(panel: Any, results: Sequence[dict[str, Any]]) -> None:
    """A dashed line of slope 1 through the last point of the costliest."""
    last = max((result["points"][-1] for result in results), key=lambda point: point["cpu_s"])
    first = min(result["points"][0]["size"] for result in results)
    ends = [last["cpu_s"] * first / last["size"], last["cpu_s"]]
    panel.loglog([first, last["size"]], ends, "--", color="gray", linewidth=1, label="linear")


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| cost | largest size | CPU s | by the clock, s | slope | memory, MiB | its slope | stopped |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        last = each["points"][-1]
        slopes = ["" if slope is None else f"{slope:.2f}" for slope in (each["slope"], each["memory_slope"])]
        size = f"{last['size']:,} {each['of']}"
        seconds = f"{last['cpu_s']:.3g} | {last['wall_s']:.3g}"
        memory = f"{last['memory_mib']:,.0f} | {slopes[1]}"
        lines.append(f"| {each['cost']} | {size} | {seconds} | {slopes[0]} | {memory} | {each['stopped']} |")
    return "\n".join(lines)


def with_table(page: str, begin: str, table: str) -> str:
    """The page with a table between its two marks."""
    before, _, rest = page.partition(begin)
    after = rest.partition(END)[2]
    return f"{before}{begin}\n\n{table}\n\n{END}{after}"


def read_long_runs(folder: Path = HERE / "long_runs") -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def processes_of(run: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """(step, MiB) of each process that lived for most of the run."""
    names = {name for point in run["points"] for name in point["mib"]}
    found = {
        name: [(point["step"], point["mib"][name]) for point in run["points"] if name in point["mib"]]
        for name in sorted(names)
    }
    return {name: line for name, line in found.items() if 2 * len(line) > len(run["points"])}


def draw_long_runs(runs: Sequence[dict[str, Any]], out: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "growth"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(runs), figsize=(7 * len(runs), 5), layout="constrained", squeeze=False)
    for panel, run in zip(axes.flat, runs, strict=True):
        for name, line in processes_of(run).items():
            panel.plot(*zip(*line, strict=True), label=name)
        panel.set_title(run["run"])
        panel.set_xlabel("steps")
        panel.set_ylabel("resident memory, MiB")
        panel.set_ylim(bottom=0)
        panel.grid(visible=True, alpha=0.3)
        panel.legend(fontsize=8)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def long_runs_table(runs: Sequence[dict[str, Any]], columns: int = 10) -> str:
    """Memory at ten steps of each run, a row for each process."""
    lines: list[str] = []
    for run in runs:
        steps = [run["steps"] * (number + 1) // columns for number in range(columns)]
        lines += [f"| {run['run']}: after steps | " + " | ".join(f"{step:,}" for step in steps) + " |"]
        lines += ["|---|" + "---|" * columns]
        for name, line in processes_of(run).items():
            nearest = [min(line, key=lambda point: abs(point[0] - step))[1] for step in steps]
            lines.append(f"| {name} | " + " | ".join(f"{mib:,.0f}" for mib in nearest) + " |")
        lines.append("")
    return "\n".join(lines[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "growth.svg", help="a .svg or .png file")
    args = parser.parse_args()
    results, runs = read_results(), read_long_runs()
    draw(results, args.out)
    draw_long_runs(runs, args.out.with_stem("long_runs"))
    page = with_table(PAGE.read_text(), BEGIN, table(results))
    PAGE.write_text(with_table(page, BEGIN_LONG_RUNS, long_runs_table(runs)))


if __name__ == "__main__":
    main()
