"""Computes statistics from measurements and formats them as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from children import Watched

FLOP_PER_TOKEN = 0.86e9
"""FLOP per token of SmolLM2-135M at 512 tokens per row: 6 N + 6 L d S (N = 134.5e6, L = 30, d = 576, S = 512)."""
COMPARED = ("tokens_per_s", "peak_gb", "startup_s")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row in one round."""

    row: str
    tokens_per_s: float | None
    """Median over the steps after the first; tokens of samples, not of padding. None for a run of one step."""
    step_s: float | None
    startup_s: float
    """Seconds from the start of the first process to the start of the first step."""
    peak_gb: float
    losses: list[float]

    @classmethod
    def from_run(cls, row: str, watched: Watched, results: Mapping[str, Any]) -> Measurement:
        """Combine the measurements of the process tree with the results that the row wrote."""
        steps = results["steps"]
        seconds = [step["ended_at"] - before["ended_at"] for before, step in pairwise(steps)]
        rates = [step["tokens"] / each_s for step, each_s in zip(steps[1:], seconds, strict=True)]
        startup_s = results["first_step_began_at"] - watched.started_at
        losses = [step["loss"] for step in steps]
        rate, step_s = (median(values) if values else None for values in (rates, seconds))
        return cls(row, rate, step_s, startup_s, watched.peak_gb, losses)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def comparison(records: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Build a Markdown table and its values: medians over the rounds."""
    peak = median_of(record["gflops"] for record in records if record["row"] == "matmul")
    rows: dict[str, dict[str, float]] = {}
    for record in records:
        if "tokens_per_s" in record and record["row"] not in rows:
            same = [other for other in records if other["row"] == record["row"]]
            rows[record["row"]] = _figures(same, peak)
    ratios = {
        f"{ours} / {theirs}": {key: rows[ours][key] / rows[theirs][key] for key in COMPARED}
        for ours in rows
        if ours.startswith("ours")
        for theirs in rows
        if not theirs.startswith("ours")
    }
    losses = [record["ours_and_trl"] for record in records if record["row"] == "losses"]
    text = "\n".join([*_rows_table(rows, peak), "", *_ratio_table(ratios), *_loss_table(losses[-1] if losses else [])])
    return text, {"matmul_bf16_gflops": peak, "rows": rows, "ratios": ratios, "losses": losses[-1] if losses else None}


def median_of(values: Iterable[float | None]) -> float:
    """The median of what was measured; NaN if nothing was."""
    measured = [value for value in values if value is not None]
    return float(median(measured)) if measured else math.nan


def _figures(same: Sequence[Mapping[str, Any]], peak: float) -> dict[str, float]:
    rates = [record["tokens_per_s"] for record in same if record["tokens_per_s"] is not None] or [math.nan]
    figures = {key: median_of(record[key] for record in same) for key in (*COMPARED, "step_s")}
    share = figures["tokens_per_s"] * FLOP_PER_TOKEN / (peak * 1e9)
    starts = [record["startup_s"] for record in same]
    ranges = {"least": min(rates), "most": max(rates), "least_startup_s": min(starts), "most_startup_s": max(starts)}
    return figures | ranges | {"rounds": len(same), "matmul_share": share}


def _rows_table(rows: Mapping[str, Mapping[str, float]], peak: float) -> list[str]:
    lines = [
        f"bfloat16 matrix products of these cores: {peak:.0f} GFLOP/s",
        "",
        "| row | tokens/s (range of rounds) | s/step | peak GB | start-up s (range) | share of matmul peak | rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        rate = f"{row['tokens_per_s']:.0f} ({row['least']:.0f} to {row['most']:.0f})"
        startup = f"{row['startup_s']:.2f} ({row['least_startup_s']:.2f} to {row['most_startup_s']:.2f})"
        share = f"{row['matmul_share']:.0%}"
        peak_gb, rounds = f"{row['peak_gb']:.2f}", f"{row['rounds']:.0f}"
        lines.append(f"| {name} | {rate} | {row['step_s']:.1f} | {peak_gb} | {startup} | {share} | {rounds} |")
    return lines


def _ratio_table(ratios: Mapping[str, Mapping[str, float]]) -> list[str]:
    lines = ["| ratio | tokens/s | peak memory | start-up |", "|---|---|---|---|"]
    for name, ratio in ratios.items():
        cells = (f"{ratio[key]:.2f}" for key in COMPARED)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _loss_table(losses: Sequence[Sequence[float]]) -> list[str]:
    if not losses:
        return []
    lines = ["", "| step, unpacked, float32 | our loss | TRL's |", "|---|---|---|"]
    return lines + [f"| {step} | {ours:.5f} | {trl:.5f} |" for step, (ours, trl) in enumerate(losses)]
