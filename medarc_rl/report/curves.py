"""Metrics of a report over steps: which metrics of which process, as charts and as tables of final values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev

from medarc_rl.report.charts import Band, Chart, Group, Line, Section, Series, Table, chart_of, short
from prime_rl.history.metrics import finite
from prime_rl.history.run import RunHistory
from prime_rl.history.spending import ORCHESTRATOR

TRAIN = "train"
"""Stands for the source of the loss: `trainer`, or `sft`."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric that every run of a kind may have."""

    metric: str
    source: str
    title: str
    unit: str = ""
    spread: tuple[str, str, str] | None = None
    """Title of a band, and the metrics of its ends. With an empty third name, the second is a standard deviation."""
    scale: float = 1.0
    median: str = ""
    """Metric of a second line."""
    per: str = ""
    """Metric to divide by."""

    def read(self, run: RunHistory) -> Series:
        source = run.trainer if self.source == TRAIN else self.source
        series = run.metrics.series(self.metric, source)
        if self.per:
            divisors = run.metrics.series(self.per, source)
            series = {step: value / divisors[step] for step, value in series.items() if divisors.get(step)}
        return _scaled(series, self.scale)

    def band(self, run: RunHistory) -> Band | None:
        if self.spread is None:
            return None
        title, first, second = self.spread
        source = run.trainer if self.source == TRAIN else self.source
        low = _scaled(run.metrics.series(first, source), self.scale)
        if second:
            high = _scaled(run.metrics.series(second, source), self.scale)
        else:
            mean = self.read(run)
            low, high = (
                {step: mean[step] + sign * value for step, value in low.items() if step in mean} for sign in (-1, 1)
            )
        return Band(title, low, high) if low and high else None


REWARD = Curve(
    "reward/mean",
    ORCHESTRATOR,
    "Reward",
    "of the batch",
    ("± 1 standard deviation", "reward/std", ""),
    median="reward/median",
)
LOSS = Curve("loss/mean", TRAIN, "Loss", "per token")
LENGTH = Curve(
    "decode_len/mean",
    ORCHESTRATOR,
    "Completion length",
    "tokens",
    ("shortest to longest", "decode_len/min", "decode_len/max"),
)
TRUNCATED = Curve("is_truncated/mean", ORCHESTRATOR, "Truncated rollouts", "%", scale=100)
ENTROPY = Curve("entropy/mean", TRAIN, "Entropy", "nats per token")
MISMATCH = Curve("mismatch_kl/mean", TRAIN, "Mismatch KL, trainer against engine", "nats per token")
RATE = Curve("optim/lr", TRAIN, "Learning rate")
GRADIENT = Curve("optim/grad_norm", TRAIN, "Gradient norm")
MEMORY = Curve("perf/peak_memory", TRAIN, "Peak memory of a trainer process", "GiB")
VALIDATION = Curve("val/loss", TRAIN, "Validation loss", "per token")
VALIDATION_REWARD = Curve("val_reward/mean", ORCHESTRATOR, "Validation reward")

RL_CURVES = (
    REWARD,
    LOSS,
    ENTROPY,
    MISMATCH,
    LENGTH,
    TRUNCATED,
    Curve("error/mean", ORCHESTRATOR, "Rollouts with an error", "%", scale=100),
    Curve("failed_groups/share", ORCHESTRATOR, "Groups that the environment failed", "%", scale=100),
    Curve(
        "batch/effective_batch_size", ORCHESTRATOR, "Groups that are neither all solved nor all failed", "%", scale=100
    ),
    Curve("batch/lag/mean", ORCHESTRATOR, "Lag of the rollouts", "steps"),
    RATE,
    GRADIENT,
)
SFT_CURVES = (LOSS, VALIDATION, RATE, GRADIENT, Curve("progress/epoch", TRAIN, "Epoch"))
SPEED_CURVES = (
    Curve("perf/throughput", TRAIN, "Throughput of the trainer", "tokens/s"),
    # Not `perf/throughput`, which only counts the time that a step waits for its batch.
    Curve("progress/tokens", ORCHESTRATOR, "Tokens of the batch per second of the step", "tokens/s", per="time/step"),
    Curve("perf/mfu", TRAIN, "Model FLOPs utilisation", "%"),
)
EVAL_SCORES = ("avg@", "pass@")


def curves_of(kind: str) -> tuple[Curve, ...]:
    return {"rl": RL_CURVES, "sft": SFT_CURVES, "eval": ()}[kind]


def training_charts(groups: Sequence[Group], kind: str) -> list[Chart]:
    """Reward, loss and the rest over steps."""
    charts = [chart for curve in curves_of(kind) for chart in curve_chart(groups, curve)]
    parts = part_charts(groups)
    return [*charts[:1], *parts, *charts[1:]] if kind == "rl" else charts


def curve_chart(groups: Sequence[Group], curve: Curve) -> list[Chart]:
    """One line for each group; a single run also shows its spread."""
    key = f"{curve.source}-{curve.metric}"
    if len(groups) == 1 and len(groups[0].runs) == 1:
        run = groups[0].runs[0]
        has_median = curve.median in run.metrics.names(curve.source)
        lines = [Line("mean" if has_median else curve.title, curve.read(run), curve.band(run))]
        if has_median:
            lines.append(Line("median", run.metrics.series(curve.median, curve.source), color=7, is_dashed=True))
    else:
        lines = [group.line(curve.read) for group in groups]
    return [chart for chart in chart_of(key, curve.title, lines, unit=curve.unit) if not _is_all_zero(chart)]


def _is_all_zero(chart: Chart) -> bool:
    """A count of what never happened, such as truncation, is a sentence and no chart."""
    return chart.unit == "%" and all(value == 0 for line in chart.lines for value in line.values.values())


def never_happened(groups: Sequence[Group], kind: str) -> list[str]:
    """A sentence for each share that stayed at 0."""
    found = []
    for curve in (TRUNCATED, *(curve for curve in curves_of(kind) if curve.metric == "error/mean")):
        values = [value for group in groups for run in group.runs for value in curve.read(run).values()]
        if values and not any(values):
            found.append(f"{curve.title}: none in any step.")
    return found


def part_charts(groups: Sequence[Group]) -> list[Chart]:
    """Charts of the reward functions: all in one for a single run, one each to compare runs."""
    names = dict.fromkeys(name for group in groups for run in group.runs for name in _names(run, "reward_parts/"))
    if len(names) < 2:
        return []
    if len(groups) == 1 and len(groups[0].runs) == 1:
        run = groups[0].runs[0]
        lines = [
            Line(name.removeprefix("reward_parts/"), run.metrics.series(name, ORCHESTRATOR), color=color)
            for color, name in enumerate(names)
        ]
        return chart_of("reward-parts", "Reward functions", lines, unit="mean, without weights")
    curves = [Curve(name, ORCHESTRATOR, f"Reward function {name.removeprefix('reward_parts/')}") for name in names]
    return [chart for curve in curves for chart in curve_chart(groups, curve)]


def evaluation_charts(groups: Sequence[Group]) -> list[Chart]:
    """Scores of each evaluation set, then lengths and failures."""
    names = dict.fromkeys(name for group in groups for run in group.runs for name in evaluation_names(run))
    by_title: dict[str, list[str]] = {}
    for name in names:
        env, _, score = name.removeprefix("eval/").rpartition("/")
        by_title.setdefault(f"{env}: pass@k" if score.startswith("pass@") else f"{env}: {score}", []).append(name)
    charts = []
    for title, members in by_title.items():
        lines = []
        for color, name in enumerate(members):
            for group in groups:
                line = group.line(partial(evaluation_series, name=name))
                score = name.rpartition("/")[2]
                several = len(members) > 1
                shown = f"{score}, {line.title}" if several and len(groups) > 1 else score if several else line.title
                lines.append(Line(shown, line.values, line.band, color if several else group.color))
        # One value is in the table.
        if any(len(line.values) > 1 for line in lines):
            charts += chart_of(f"eval-{title}", title, lines, x_title="updates", unit="score")
    return [*charts, *curve_chart(groups, VALIDATION_REWARD)]


def evaluation_names(run: RunHistory) -> Iterator[str]:
    for source in run.metrics.sources:
        for name in run.metrics.names(source):
            if name.startswith("eval/") and name.rpartition("/")[2].startswith(EVAL_SCORES):
                yield name


def evaluation_series(run: RunHistory, name: str) -> Series:
    """A metric of evaluations, from the process that reports it."""
    return next((found for source in run.metrics.sources if (found := run.metrics.series(name, source))), {})


def held_out(run: RunHistory) -> dict[str, Series]:
    """Mean scores on rows that the run does not train on, by title."""
    shares = trained_shares(run)
    return {title: series for title, series in _scores_beside_training(run).items() if not shares[title]}


def on_training_rows(run: RunHistory) -> dict[str, tuple[Series, float]]:
    """Mean scores of evaluations whose prompts are trained on, by title, and the share of these prompts."""
    shares = trained_shares(run)
    return {title: (series, shares[title]) for title, series in _scores_beside_training(run).items() if shares[title]}


def trained_shares(run: RunHistory) -> dict[str, float]:
    """Share of the prompts of each evaluation that are trained on. 0 for runs of versions that did not count them."""
    names = {title: title.removeprefix("evaluation ").rpartition("/")[0] for title in _scores_beside_training(run)}
    counted = {
        title: f"eval/{env}/trained_prompts/mean" if env else "val_trained_prompts/mean" for title, env in names.items()
    }
    return {title: max(evaluation_series(run, name).values(), default=0.0) for title, name in counted.items()}


def _scores_beside_training(run: RunHistory) -> dict[str, Series]:
    scores = {name: evaluation_series(run, name) for name in evaluation_names(run) if "/avg@" in name}
    found = {f"evaluation {name.removeprefix('eval/')}": series for name, series in scores.items()}
    validation = VALIDATION_REWARD.read(run)
    return {**found, **({"validation reward": validation} if validation else {})}


def _names(run: RunHistory, prefix: str) -> list[str]:
    return [name for name in run.metrics.names(ORCHESTRATOR) if name.startswith(prefix)]


def reward_parts(run: RunHistory) -> dict[str, Series]:
    """The mean of each reward function, by name."""
    names = _names(run, "reward_parts/")
    return {name.removeprefix("reward_parts/"): run.metrics.series(name, ORCHESTRATOR) for name in names}


def _scaled(series: Series, scale: float) -> Series:
    return series if scale == 1 else {step: value * scale for step, value in series.items()}


# The same metrics as tables: final values of the runs, evaluations, rows of SFT data


_ROW_COUNTS = {
    "data/seen": "rows read",
    "data/truncated": "cut at the maximum length",
    "data/overlong": "dropped: too long",
    "data/untrainable": "dropped: no token to train on",
    "data/unmaskable": "dropped: the template cannot be masked",
}


def finals_table(groups: Sequence[Group], kind: str) -> Table | None:
    """Means at the end of the runs with standard errors: over runs if a label has several, otherwise over steps."""
    rows = []
    for curve in {"rl": (REWARD, ENTROPY, MISMATCH, LENGTH, TRUNCATED), "sft": (LOSS, VALIDATION)}.get(kind, ()):
        title = f"{curve.title}, {curve.unit}" if curve.unit else curve.title
        rows.append((title, *(_final_cell(group, curve.read) for group in groups)))
    for name in dict.fromkeys(name for group in groups for run in group.runs for name in evaluation_names(run)):
        read = partial(evaluation_series, name=name)
        rows.append((name.removeprefix("eval/"), *(_last_cell(group, read) for group in groups)))
    rows = [row for row in rows if any(cell != "–" for cell in row[1:])]
    if not rows:
        return None
    caption = (
        "Final values: mean over the last tenth of the steps (at least 5) ± standard error, over the runs of a label "
        "if it has several, otherwise over these steps; evaluations: the last one"
    )
    return Table(("", *(group.label for group in groups)), rows, caption)


def _final_cell(group: Group, read: Callable[[RunHistory], Series]) -> str:
    found = group.final(lambda run: finite(read(run)))
    if found is None:
        return "–"
    mean, error, over = found
    runs = f" ({len(group.runs)} runs)" if over == "runs" else ""
    return f"{short(mean)}{f' ± {short(error, 2)}' if error is not None else ''}{runs}"


def _last_cell(group: Group, read: Callable[[RunHistory], Series]) -> str:
    last = [values[max(values)] for run in group.runs if (values := finite(read(run)))]
    if not last:
        return "–"
    if len(last) == 1:
        return short(last[0])
    return f"{short(fmean(last))} ± {short(stdev(last) / len(last) ** 0.5, 2)} ({len(last)} runs)"


def evaluation_table(run: RunHistory) -> Table | None:
    """All scores of a run's evaluations by the number of updates."""
    names = list(dict.fromkeys(evaluation_names(run)))
    series = {name: evaluation_series(run, name) for name in names}
    steps = sorted({step for values in series.values() for step in values})
    if not steps:
        return None
    rows = [(str(step), *(short(series[name].get(step)) for name in names)) for step in steps]
    return Table(("updates", *(name.removeprefix("eval/") for name in names)), rows, "Evaluations")


def data_section(groups: Sequence[Group]) -> Section:
    """Counts of SFT rows: read, cut, and dropped with the reason."""
    section = Section("data", "Data")
    runs = [run for group in groups for run in group.runs if run.kind == "sft"]
    counts = [{name: run.metrics.last(name, run.trainer) for name in _ROW_COUNTS} for run in runs]
    counts = [each for each in counts if each["data/seen"] is not None]
    if not counts:
        if runs:
            section.notes.append("No step has been finished, so no rows have been counted.")
        return section
    rows = []
    for name, title in _ROW_COUNTS.items():
        cells = []
        for each in counts:
            value, seen = each[name], each["data/seen"]
            share = f" ({value / seen:.1%})" if value is not None and seen and name != "data/seen" else ""
            cells.append(f"{short(value)}{share}")
        rows.append((title, *cells))
    headers = ("rows, over all processes", *([run.name for run in runs] if len(runs) > 1 else ["number"]))
    section.tables.append(Table(headers, rows, "What became of the rows"))
    return section
