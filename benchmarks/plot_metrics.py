# /// script
# requires-python = ">=3.11"
# dependencies = ["matplotlib==3.10.8"]
# ///
"""Plot a metric of one or several runs from their `metrics.jsonl`: each run as a thin line, the smoothed mean thick.

    uv run benchmarks/plot_metrics.py outputs/seed0 outputs/seed1 --metric reward/mean --out rewards.png
    uv run benchmarks/plot_metrics.py grpo=outputs/g0,outputs/g1 dapo=outputs/d0 --metric reward/mean --out rewards.png

Runs joined by commas are seeds of one curve, which `label=` names; without a label, all runs are one curve. Several
`--metric` options make several panels; `trainer:time/step` selects one source. `uv run` gives the script its own
environment with matplotlib. If a resumed run wrote a step twice, the last value counts.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

Curve = dict[int, float]
"""Values by step."""

COLOURS = ("#0b6e99", "#c2571a", "#4d7a21", "#7a3e9d", "#a32638")


class PlotError(Exception):
    """There is nothing to plot; the message says why."""


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that are seeds of one curve."""

    label: str
    runs: tuple[Path, ...]


def parse_groups(words: Sequence[str]) -> list[Group]:
    """Groups of runs from the command line. Directories without a label form one group."""
    groups: list[Group] = []
    unnamed: list[Path] = []
    for word in words:
        label, has_label, names = word.rpartition("=")
        runs = tuple(Path(name) for name in names.split(","))
        if has_label and not Path(word).exists():
            groups.append(Group(label, runs))
        else:
            unnamed += [Path(word)] if Path(word).exists() else runs
    if unnamed:
        groups.insert(0, Group(unnamed[0].name if len(unnamed) == 1 else f"{len(unnamed)} runs", tuple(unnamed)))
    return groups


def read_curve(run: Path, metric: str) -> Curve:
    """The metric by step, from a run's directory or a `metrics.jsonl` file. `source:metric` selects one source.

    Raises:
        PlotError: there is no such file, or no such metric in it.
    """
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise PlotError(f"{path}: no such file")
    source, _, name = metric.rpartition(":")
    curve: Curve = {}
    known: set[str] = set()
    for record in _records(path):
        known |= record.keys()
        if record.get(name) is not None and source in ("", record["source"]):
            curve[int(record["step"])] = float(record[name])
    if not curve:
        nearest = difflib.get_close_matches(name, known, n=5, cutoff=0.4)
        raise PlotError(f"{path} has no {metric}" + (f": {', '.join(nearest)}?" if nearest else ""))
    return dict(sorted(curve.items()))


def _records(path: Path) -> Iterable[dict]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # a full disk, or a run that is writing now, leaves an incomplete line
            continue


def mean_of(curves: Sequence[Curve]) -> Curve:
    """Mean of the curves, at the steps that all of them have."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {step: sum(curve[step] for curve in curves) / len(curves) for step in steps}


def smoothed(curve: Curve, window: int) -> Curve:
    """Centred mean over `window` points; fewer near the ends, so that the curve does not lag."""
    values = list(curve.values())
    smooth: Curve = {}
    for at, step in enumerate(curve):
        reach = min(window // 2, at, len(values) - 1 - at)
        smooth[step] = sum(values[at - reach : at + reach + 1]) / (2 * reach + 1)
    return smooth


def draw(groups: Sequence[Group], options: argparse.Namespace) -> None:
    """Write the picture.

    Raises:
        PlotError: a run lacks its metrics.
    """
    curves = {(g.label, m): [read_curve(run, m) for run in g.runs] for g in groups for m in options.metric}
    import matplotlib.pyplot as plt

    figure, row = plt.subplots(1, len(options.metric), figsize=(6.4 * len(options.metric), 3.6), squeeze=False)
    for axes, metric in zip(row[0], options.metric, strict=True):
        for index, group in enumerate(groups):
            _draw_group(axes, group.label, curves[group.label, metric], COLOURS[index % len(COLOURS)], options.window)
        axes.set(xlabel="step", ylabel=metric, yscale="log" if options.log else "linear")
        axes.grid(color="#ddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if len(groups) > 1 or len(groups[0].runs) > 1:
            axes.legend(frameon=False)
    figure.suptitle(options.title)
    figure.tight_layout()
    figure.savefig(options.out, dpi=110)


def _draw_group(axes, label: str, curves: Sequence[Curve], colour: str, window: int) -> None:
    for curve in curves:
        axes.plot(list(curve), list(curve.values()), color=colour, alpha=0.3, linewidth=0.8)
    mean = smoothed(mean_of(curves), window)
    seeds = f", mean of {len(curves)}" if len(curves) > 1 else ""
    axes.plot(list(mean), list(mean.values()), color=colour, linewidth=1.9, label=label + seeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, or LABEL=DIR[,DIR...]")
    parser.add_argument("--metric", action="append", required=True, help="for example loss/mean; repeatable")
    parser.add_argument("--out", type=Path, required=True, help="picture to write: .png, .svg or .pdf")
    parser.add_argument("--window", type=int, default=9, help="steps that the thick line averages over; 1: none")
    parser.add_argument("--title", default="", help="above the picture")
    parser.add_argument("--log", action="store_true", help="logarithmic values")
    options = parser.parse_args()
    try:
        draw(parse_groups(options.runs), options)
    except PlotError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
