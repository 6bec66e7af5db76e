"""Draw the mean reward of each step of one or more RL runs as an SVG file; needs nothing but Python.

uv run python examples/med_calc/plot_rewards.py outputs/med-calc outputs/med-calc-seed1 --to rewards.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 640, 300, 45
COLOURS = ("#0b6e99", "#c2571a", "#4d7a21", "#7a3e9d", "#a32638")
STYLE = "text { font: 12px sans-serif; fill: #555 } path { fill: none; stroke-width: 1.8 } line { stroke: #ccc }"


def rewards(run: Path) -> list[float]:
    """`reward/mean` of every step, 0 to 1, from a run's `metrics.jsonl`."""
    records = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [record["reward/mean"] for record in records if "reward/mean" in record]


def draw(curves: Sequence[Sequence[float]]) -> str:
    """One line a run, over a grid of steps and rewards."""
    last = max(len(curve) for curve in curves) - 1

    def x(step: float) -> float:
        return MARGIN + step / max(last, 1) * (WIDTH - 2 * MARGIN)

    def y(reward: float) -> float:
        return HEIGHT - MARGIN - reward * (HEIGHT - 2 * MARGIN)

    parts = []
    for tenth in range(0, 11, 2):
        height = y(tenth / 10)
        parts.append(f'<line x1="{x(0)}" y1="{height:.1f}" x2="{x(last)}" y2="{height:.1f}"/>')
        parts.append(f'<text x="{MARGIN - 8}" y="{height + 4:.1f}" text-anchor="end">{tenth / 10}</text>')
    for step in sorted({round(last * quarter / 4) for quarter in range(5)}):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - MARGIN + 20}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    parts.append(f'<text x="{MARGIN}" y="{MARGIN - 18}">mean reward</text>')
    for index, curve in enumerate(curves):
        points = " L ".join(f"{x(step):.1f} {y(reward):.1f}" for step, reward in enumerate(curve))
        parts.append(f'<path stroke="{COLOURS[index % len(COLOURS)]}" d="M {points}"/>')
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    body = "\n".join([f"<style>{STYLE}</style>", background, *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{body}\n</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="directories of RL runs")
    parser.add_argument("--to", type=Path, required=True, help="the SVG file to write")
    options = parser.parse_args()
    options.to.write_text(draw([rewards(run) for run in options.runs]), encoding="utf-8")


if __name__ == "__main__":
    main()
