"""The top of a report: tiles with state, steps, reward or loss, time, tokens, GPU-hours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from medarc_rl.report.charts import short
from medarc_rl.report.curves import LOSS, REWARD, VALIDATION, evaluation_names, evaluation_series
from prime_rl.history.metrics import trend
from prime_rl.history.run import RunHistory
from prime_rl.history.spending import Spending


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure of the headline."""

    title: str
    value: str
    detail: str = ""
    state: str = ""
    """Name of a run's state, which gives the tile its mark."""


def tiles(run: RunHistory, spending: Sequence[Spending], price: float | None) -> list[Tile]:
    """The headline of one run."""
    found = [_state(run), _steps(run)]
    if run.kind == "rl":
        found += _change("Reward", run, REWARD.read(run))
    elif run.kind == "sft":
        found += _change("Loss", run, LOSS.read(run))
        found += _change("Validation loss", run, VALIDATION.read(run))
    else:
        found += _scores(run)
    seconds = sum(each.seconds for each in spending)
    if spending:
        several = f"in {len(spending)} attempts" if len(spending) > 1 else ""
        found.append(Tile("Time", duration(seconds), several))
    if (tokens := tokens_of(run)) is not None:
        found.append(
            Tile("Tokens", _count(tokens), "trained on, prompts included" if run.kind == "rl" else "trained on")
        )
    return [*found, *cost_tiles(spending, price)]


def cost_tiles(spending: Sequence[Spending], price: float | None) -> list[Tile]:
    hours = gpu_hours(spending)
    if hours is None:
        return []
    cost = f"{hours * price:,.2f} USD at {price:g} USD per GPU-hour" if price is not None else ""
    return [Tile("GPU-hours", f"{hours:,.2f}", cost or ("no GPU was used" if not hours else ""))]


def gpu_hours(spending: Sequence[Spending]) -> float | None:
    """Sum over attempts. None if no attempt names its GPUs."""
    known = [hours for each in spending if (hours := each.all_gpu_hours) is not None]
    return sum(known) if known else None


def tokens_of(run: RunHistory) -> float | None:
    names = {"rl": ("progress/total_tokens", "orchestrator"), "sft": ("progress/num_tokens", run.trainer)}
    return run.metrics.last(*names[run.kind]) if run.kind in names else None


def _state(run: RunHistory) -> Tile:
    state = run.state()
    # Who runs it says since when.
    at = moment(state.at_s) if state.at_s is not None and state.name != "running" else ""
    detail = "; ".join(filter(None, (state.detail, at)))
    return Tile("State", state.name, detail, state.name)


def _steps(run: RunHistory) -> Tile:
    if run.kind == "eval":
        names = set(evaluation_names(run))
        candidates = {step for name in names for step in evaluation_series(run, name)}
        environments = {name.rpartition("/")[0] for name in names}
        return Tile(
            "Evaluated",
            counted(len(candidates), "set of weights", "sets of weights"),
            counted(len(environments), "environment"),
        )
    done, planned = run.steps_done, run.max_steps
    return Tile("Steps", f"{done:,}" + (f" of {planned:,}" if planned is not None else ""), "numbered from 0")


def _change(title: str, run: RunHistory, series: object) -> list[Tile]:
    found = trend(series)  # type: ignore[arg-type]
    if found is None:
        return []
    steps = found.first.last_step - found.first.first_step + 1
    over = f"means of the first and last {steps} steps" if steps > 1 else "first and last value"
    return [Tile(title, f"{short(found.first.mean, 3)} → {short(found.last.mean, 3)}", over)]


def _scores(run: RunHistory) -> list[Tile]:
    found = []
    for name in evaluation_names(run):
        series = evaluation_series(run, name)
        if "/avg@" in name and series:
            first, last = series[min(series)], series[max(series)]
            steps = str(min(series)) if len(series) == 1 else f"{min(series)} to {max(series)}"
            shown = short(last, 3) if len(series) == 1 else f"{short(first, 3)} → {short(last, 3)}"
            found.append(Tile(name.removeprefix("eval/"), shown, f"after {steps} updates"))
    return found[:4]


def counted(count: int, singular: str, plural: str = "") -> str:
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {whole % 60:02} s"


def moment(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _count(value: float) -> str:
    for limit, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.3g}{letter}"
    return f"{value:,.0f}"
